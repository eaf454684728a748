"""Settings of a method as text, such as `num_tokens=20`, become values; and what a seed may be."""

import ast
from collections.abc import Sequence
from typing import Any, get_type_hints

from specjax.core.errors import SpecjaxError
from specjax.methods import METHODS, check_settings

BOOLEANS = {"true": True, "false": False}
MOST_SEED = 2**32 - 1


def read_settings(method: str, assignments: Sequence[str]) -> dict[str, Any]:
    """The settings in `assignments`, each `name=value`, with the types of the method's fields.

    Raises:
        SpecjaxError: for an unknown method or setting, or a value that it cannot have.
    """
    texts = dict(_split(assignment) for assignment in assignments)
    types = get_type_hints(METHODS[method].drafter) if method in METHODS else {}
    settings = {name: _value(name, text, types.get(name, str)) for name, text in texts.items()}
    check_settings(method, settings)
    return settings


def check_seed(seed: int) -> None:
    """Raises SpecjaxError for a seed that a key cannot tell from another."""
    if not 0 <= seed <= MOST_SEED:
        raise SpecjaxError(f"--seed {seed} is outside 0 to {MOST_SEED}; take another")


def _split(assignment: str) -> tuple[str, str]:
    name, equals, text = assignment.partition("=")
    if not (name and equals):
        raise SpecjaxError(f"--set {assignment!r} is not NAME=VALUE; write --set num_tokens=20")
    return name.strip().replace("-", "_"), text.strip()


def _value(name: str, text: str, kind: Any) -> Any:
    try:
        if kind is bool:
            return BOOLEANS[text.lower()]
        if kind in (int, float, str):
            return kind(text)
        return ast.literal_eval(text)
    except (ValueError, KeyError, SyntaxError):
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}
        raise SpecjaxError(
            f"--set {name}={text}: {text!r} is not {wanted.get(kind, 'a Python value')}; "
            "`specjax methods` shows the defaults"
        ) from None
