"""`specjax methods`: prints the table of methods."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specjax.methods import Method

MAX_ITEMS = 4  # shown of a tuple


@dataclass(frozen=True)
class Methods:
    """List the drafting methods with their requirements, papers and settings."""

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
    """Returns `name=default` for each setting; marks those that depend on the target."""
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
        f"{name}={_short(fitted[name])} for 32 layers, adapted to each target"
        if name in fitted
        else f"{name}={_short(default)}"
        for name, default in method.settings.items()
    ]


def _short(value: Any) -> str:
    if isinstance(value, tuple) and len(value) > MAX_ITEMS:
        shown = ", ".join(map(str, value[:MAX_ITEMS]))
        return f"({shown}, ... {len(value)} in total)"
    return str(value)
