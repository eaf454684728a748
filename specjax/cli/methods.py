"""`specjax methods`: the table of methods."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specjax.decoding.drafters import Method


@dataclass(frozen=True)
class Methods:
    """List the drafting methods: what they need, where they come from, and their settings."""

    def run(self) -> None:
        """Prints the table."""
        from rich.console import Console
        from rich.table import Table

        from specjax.decoding.drafters import METHODS

        table = Table("method", "needs", "paper", "settings (--set)", show_lines=True)
        for name, method in METHODS.items():
            table.add_row(name, method.needs, method.paper, "\n".join(describe_settings(method)))
        Console(markup=False, highlight=False).print(table)


def describe_settings(method: "Method") -> list[str]:
    """`name=default` for each field of the drafter; those that depend on the target say so."""
    from specjax.cli.settings import STAND_IN

    fitted = method.settings_for(STAND_IN)
    return [
        f"{name}={fitted[name]} for {STAND_IN.num_hidden_layers} layers, fitted to each target"
        if name in fitted
        else f"{name}={default}"
        for name, default in ((field.name, field.default) for field in fields(method.drafter))
    ]
