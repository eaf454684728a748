"""Values that the settings of a dataclass must reject, derived from their bounds."""

import math
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any, get_args, get_origin, get_type_hints

from specjax.core.settings import bounds_of


def rejected_values(owner: type) -> Iterator[tuple[str, Any]]:
    """Yields fields that have defaults with values that they must reject."""
    hints = get_type_hints(owner)
    for field in fields(owner):
        name, hint, bounds = field.name, hints[field.name], bounds_of(owner, field.name)
        if field.default is MISSING or hint is Any:
            continue
        yield name, ...
        if bounds.choices:
            yield name, "no such choice"
        has_floats = hint is float or float in get_args(hint)
        step = math.nextafter if has_floats else lambda x, toward: x + math.copysign(1, toward)
        invalid = [math.nan, math.inf, -math.inf] if has_floats and str(bounds) else []
        invalid += [] if bounds.at_least is None else [step(bounds.at_least, -math.inf)]
        invalid += [] if bounds.at_most is None else [step(bounds.at_most, math.inf)]
        invalid += [x for x in (bounds.above, bounds.below) if x is not None]
        for value in invalid:
            value = value if has_floats else int(value)
            yield name, (value,) if get_origin(hint) is tuple else value
