"""`specjax reproduce`, whose command is part of recipes/papers."""

from dataclasses import dataclass
from typing import Any

from tyro.conf import Positional

from specjax.core.companions import companion
from specjax.core.errors import SpecjaxError


@dataclass(frozen=True)
class WithoutRecipes:
    """Run a table or figure of a paper. This copy of specjax lacks the recipes."""

    arguments: Positional[tuple[str, ...]] = ()

    def run(self) -> None:
        """Raises the error that names the missing package."""
        companion("papers")


def reproduce_command() -> Any:
    """Returns the class of the command."""
    try:
        return companion("papers.command").Reproduce
    except SpecjaxError:
        return WithoutRecipes
