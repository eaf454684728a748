"""`specjax methods`: the table of methods."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specjax.methods import Method


@dataclass(frozen=True)
class Methods:
    """List the drafting methods: what they need, where they come from, and their settings."""

    def run(self) -> None:
        """Prints the table."""
        from rich.console import Console
        from rich.table import Table

        from specjax.methods import METHODS

        table = Table("method", "needs", "paper", "settings (--set)", show_lines=True)
        for name, method in METHODS.items():
            table.add_row(name, method.needs, method.paper, "\n".join(describe_settings(method)))
        Console(markup=False, highlight=False).print(table)


def describe_settings(method: "Method") -> list[str]:
    """`name=default` for each field of the drafter; those that depend on the target say so."""
    from specjax.models.config import TransformerConfig

    llama_2_7b = TransformerConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        max_position_embeddings=4096,
    )
    fitted = method.settings_for(llama_2_7b)
    return [
        f"{name}={fitted[name]} for 32 layers, fitted to each target"
        if name in fitted
        else f"{name}={default}"
        for name, default in ((field.name, field.default) for field in fields(method.drafter))
    ]
