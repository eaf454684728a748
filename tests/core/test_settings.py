"""Settings: the values that a field's type and bounds reject."""

from dataclasses import dataclass
from typing import Literal

import pytest

from specjax.core.settings import SettingError, check_fields, setting
from tests.rejected import rejected_values


@dataclass(frozen=True)
class Options:
    count: int = setting(3, at_least=1, at_most=9)
    """Count."""
    share: float | None = setting(0.5, above=0, below=1, advice="try 0.5")
    """A share."""
    kind: str = setting("first", choices=("first", "last"))
    """Which one."""
    place: Literal["near", "far"] = "near"
    """Place."""
    sizes: tuple[int, ...] = setting((1, 2), at_least=0)
    """Sizes."""
    is_on: bool = False
    pairs: tuple[tuple[int, int], ...] = ()

    def __post_init__(self):
        check_fields(self)


@dataclass(frozen=True)
class MoreOptions(Options):
    count: int = 5  # its bounds are inherited


@pytest.mark.parametrize(
    "values",
    [
        *({name: value} for name, value in rejected_values(Options)),
        {"count": True},
        {"count": 2.0},
        {"share": False},
        {"is_on": 1},
        {"sizes": [1]},
        {"sizes": (*range(100), "x")},
        {"pairs": ((1, 2),) * 50 + ((1,),)},
    ],
    ids=str,
)
def test_values_outside_bounds_or_the_exact_type_are_rejected(values):
    with pytest.raises(SettingError) as error:
        Options(**values)
    assert [error.value.field] == list(values)


def test_messages_name_field_bounds_value_and_remedy():
    for options, default in ((Options, 3), (MoreOptions, 5)):
        message = f"`count` must be at least 1 and at most 9, got 0; the default is {default}"
        with pytest.raises(SettingError, match=message):
            options(count=0)

    with pytest.raises(SettingError, match=r"`share` must be above 0 and below 1, got 2; try 0.5"):
        Options(share=2)
    with pytest.raises(SettingError, match="`kind` must be first or last, got 'x'"):
        Options(kind="x")
    with pytest.raises(SettingError, match=r"`sizes` must be of type tuple\[int, \.\.\.\], got 3"):
        Options(sizes=3)
