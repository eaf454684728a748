"""Prints what several commands print: rows of names and descriptions, and settings."""

from collections.abc import Mapping
from typing import Any

from specjax.core.text import safe_console

MAX_ITEMS = 4  # shown of a tuple


def print_rows(title: str, rows: Mapping[str, str]) -> None:
    """Prints a title, and names with their descriptions beside them."""
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 0, 0, 2))
    for name, text in rows.items():
        table.add_row(name, text)
    print(f"{title}:")
    safe_console().print(table)


def short(value: Any) -> str:
    """Formats a setting; a long tuple is abbreviated."""
    if isinstance(value, tuple) and len(value) > MAX_ITEMS:
        shown = ", ".join(map(str, value[:MAX_ITEMS]))
        return f"({shown}, ... {len(value)} in total)"
    return "" if value is None else str(value)
