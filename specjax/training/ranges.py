"""Range checks that the options of training share."""

import math
from typing import Any

from specjax.core.errors import SpecjaxError, check_at_least


def check_at_least_one(options: Any, *names: str) -> None:
    """Raises SpecjaxError for fields below 1; None passes."""
    for name in names:
        value = getattr(options, name)
        if value is not None:
            check_at_least(name, value, 1)


def check_not_negative(options: Any, *names: str) -> None:
    """Raises SpecjaxError for fields that are negative or not finite."""
    for name in names:
        if not 0 <= getattr(options, name) < math.inf:
            raise SpecjaxError(f"{name} {getattr(options, name)} is not a finite number >= 0")


def check_positive(options: Any, *names: str) -> None:
    """Raises SpecjaxError for fields that are not above 0 or not finite."""
    for name in names:
        if not 0 < getattr(options, name) < math.inf:
            raise SpecjaxError(f"{name} {getattr(options, name)} is not a finite number above 0")


def check_choice(options: Any, name: str, choices: tuple[str, ...]) -> None:
    """Raises SpecjaxError unless the field is one of the choices."""
    value = getattr(options, name)
    if value not in choices:
        raise SpecjaxError(f"{name} {value!r} is unknown; use {', '.join(choices)}")
