"""Parses settings of a method, such as `num_tokens=20`, and checks seeds."""

import ast
from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

from specjax.core.errors import SpecjaxError
from specjax.methods import METHODS, check_settings

BOOLEANS = {"true": True, "false": False}
MAX_SEED = 2**32 - 1


def read_settings(method: str, assignments: Sequence[str]) -> dict[str, Any]:
    """Parses assignments `name=value` to values of the types that the method declares.

    Raises:
        SpecjaxError: if the method or a setting is unknown, or a value is not allowed.
    """
    texts = dict(_split(assignment) for assignment in assignments)
    types = get_type_hints(METHODS[method].drafter) if method in METHODS else {}
    settings = {name: _value(name, text, types.get(name, str)) for name, text in texts.items()}
    check_settings(method, settings, are_all=False)
    return settings


def check_seed(seed: int) -> None:
    """Raises SpecjaxError for a seed that does not fit into a key."""
    if not 0 <= seed <= MAX_SEED:
        raise SpecjaxError(f"--seed {seed} is outside 0 to {MAX_SEED}; choose another")


def _split(assignment: str) -> tuple[str, str]:
    name, equals, text = assignment.partition("=")
    if not (name and equals):
        raise SpecjaxError(f"--set {assignment!r} is not NAME=VALUE; write --set num_tokens=20")
    return name.strip().replace("-", "_"), text.strip()


def _value(name: str, text: str, kind: Any) -> Any:
    try:
        if kind is bool:
            return BOOLEANS[text.lower()]
        if str in get_args(kind):
            return text
        if kind in (int, float, str):
            return kind(text)
        return ast.literal_eval(text)
    except (ValueError, KeyError, SyntaxError):
        expected = {bool: "true or false", int: "a whole number", float: "a number"}
        raise SpecjaxError(
            f"--set {name}={text}: {text!r} is not {expected.get(kind, 'a Python value')}; "
            "see the defaults in `specjax methods`"
        ) from None
