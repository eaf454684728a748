"""`specjax reproduce` and `specjax attribute`, whose code is part of recipes/papers."""

from dataclasses import dataclass

from tyro.conf import Positional

from specjax.core.companions import companion
from specjax.core.errors import SpecjaxError


@dataclass(frozen=True)
class WithoutRecipes:
    """Not available: this copy of specjax lacks the papers' recipes."""

    arguments: Positional[tuple[str, ...]] = ()
    """The arguments of the command."""

    def run(self) -> None:
        companion("papers")


def papers_command(module: str, name: str) -> type:
    """Returns a command's class from a module of recipes/papers."""
    try:
        return getattr(companion(f"papers.{module}"), name)
    except SpecjaxError:
        return WithoutRecipes
