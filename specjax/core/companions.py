"""Imports code that a wheel has inside specjax and a checkout has next to it."""

from importlib import import_module
from types import ModuleType

from specjax.core.errors import SpecjaxError

CHECKOUT = {
    "papers": "recipes.papers",
    "peers": "benchmarks.peers",
    "notebook": "notebooks.notebook",
}


def companion(name: str) -> ModuleType:
    """Imports `notebook`, `papers`, `peers`, or a module of them, such as "papers.quotesum"."""
    package, dot, module = name.partition(".")
    for parent in (f"specjax.{package}", CHECKOUT[package]):
        path = parent + dot + module
        try:
            return import_module(path)
        except ModuleNotFoundError as error:
            if not f"{path}.".startswith(f"{error.name}."):
                raise
    raise SpecjaxError(f"this copy of specjax has no {package}; install a wheel or a checkout")
