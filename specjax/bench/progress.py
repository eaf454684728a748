"""A progress bar on stderr, for those who wait at a terminal."""

from collections.abc import Iterable
from typing import TypeVar

Step = TypeVar("Step")


def watched(steps: Iterable[Step], doing: str, count: int | None = None) -> Iterable[Step]:
    """The same steps, with a progress bar on stderr if that is a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(
        steps, doing, count, console=console, transient=True, disable=not console.is_terminal
    )
