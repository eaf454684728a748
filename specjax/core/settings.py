"""Settings: dataclass fields with bounds as metadata, from which checks, help and tests derive."""

import ast
import dataclasses
import inspect
import math
import re
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from functools import cache
from itertools import pairwise
from numbers import Integral, Real
from operator import ge, gt, le, lt
from reprlib import repr as shortened
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from specjax.core.errors import SpecjaxError

Limit = int | float | None

BOUNDS = "bounds"  # key of a field's metadata
MAX_WHOLE = 2**31 - 1  # of a setting without an upper bound: JAX computes in 32 bits
TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


class SettingError(SpecjaxError):
    """An invalid value of a setting; `field` is the setting's name."""

    def __init__(self, field: str, problem: str):
        super().__init__(f"`{field}` {problem}")
        self.field = field


@dataclass(frozen=True)
class Bounds:
    """The values that a setting allows; in a tuple, the bounds hold for every item."""

    at_least: Limit = None
    above: Limit = None
    at_most: Limit = None
    below: Limit = None
    choices: tuple[Any, ...] = ()  # of one type; values of another type pass
    advice: str = ""  # on an invalid value; if empty, the error shows the default

    def __str__(self) -> str:
        """Describes the bounds: "at least 1", "above 0 and at most 1", "first or last"."""
        if self.choices:
            *others, last = map(str, self.choices)
            return f"{', '.join(others)} or {last}" if others else last
        limits = {"at least": self.at_least, "above": self.above}
        limits |= {"at most": self.at_most, "below": self.below}
        return " and ".join(f"{word} {x}" for word, x in limits.items() if x is not None)

    def allow(self, value: Any) -> bool:
        """Whether a value is within the bounds; any bound rejects NaN and infinity."""
        if isinstance(value, tuple):
            return all(map(self.allow, value))
        if self.choices:
            return value in self.choices or not isinstance(value, type(self.choices[0]))
        if not isinstance(value, Real) or self == Bounds():
            return True
        limits = (self.at_least, ge), (self.above, gt), (self.at_most, le), (self.below, lt)
        is_finite = isinstance(value, Integral) or math.isfinite(value)
        is_within = all(x is None or holds(value, x) for x, holds in limits)
        return is_finite and not self.is_huge(value) and is_within

    def is_huge(self, value: Any) -> bool:
        """Whether a whole number without an upper bound is above those of 32 bits."""
        has_limit = self.choices or self.at_most or self.below
        return isinstance(value, Integral) and not has_limit and int(value) > MAX_WHOLE


def setting(default: Any = MISSING, **options: Any) -> Any:
    """Declares a dataclass field that `check_fields` checks; without a default it is required.

    `options` are the fields of `Bounds` and further arguments of `dataclasses.field`.
    """
    names = [field.name for field in dataclasses.fields(Bounds) if field.name in options]
    bounds = Bounds(**{name: options.pop(name) for name in names})
    return dataclasses.field(default=default, metadata={BOUNDS: bounds}, **options)


def check_fields(instance: Any) -> None:
    """Raises SettingError for the first invalid field of a dataclass, in its `__post_init__`."""
    for field in dataclasses.fields(instance):
        check_setting(type(instance), field.name, getattr(instance, field.name))


@dataclass(frozen=True)
class Checked:
    """The base of dataclasses that `check_fields` checks when they are made."""

    def __post_init__(self):
        check_fields(self)


def check_setting(owner: type, name: str, value: Any, advice: str = "") -> None:
    """Raises SettingError for an invalid value of one field of the dataclass `owner`.

    `advice` replaces the default in the error.
    """
    hint, bounds = _hints(owner)[name], bounds_of(owner, name)
    has_type = _has_type(value, hint)
    if has_type and bounds.allow(value):
        return
    is_infinite = isinstance(value, float) and not math.isfinite(value)
    is_huge = bounds.is_huge(value)
    expected = "finite" if is_infinite else f"at most {MAX_WHOLE}" if is_huge else str(bounds)
    if not has_type and not bounds.choices:
        expected = _type_name(hint)
    default = _fields(owner)[name].default
    advice = bounds.advice or advice
    if not advice and default is not MISSING:
        advice = f"the default is {shortened(default)}"
    raise SettingError(name, f"must be {expected}, got {shortened(value)}; {advice}".rstrip("; "))


def check_at_most(name: str, value: int, limit_name: str, limit: int) -> None:
    """Raises SettingError for a setting above its limit, which another setting decides."""
    if value > limit:
        raise SettingError(name, f"must be at most {limit_name}, {limit}, got {value}; lower it")


def declared_fields(owner: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Checks values from JSON for fields of the dataclass `owner`; converts lists and numbers."""
    hints = _hints(owner)
    values = {name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}
    for name, value in values.items():
        check_setting(owner, name, value)
        if value is not None and hints[name] in (float, float | None):
            values[name] = float(value)
        if hints[name] == tuple[float, ...] and isinstance(value, tuple):
            values[name] = tuple(map(float, value))
    return values


def bounds_of(owner: type, name: str) -> Bounds:
    """Returns the bounds of a field, inherited if a subclass changes only the default.

    The values of a `Literal` are choices.
    """
    for base in owner.__mro__:
        field = getattr(base, "__dataclass_fields__", {}).get(name)
        if field and BOUNDS in field.metadata:
            return field.metadata[BOUNDS]
    hint = _hints(owner)[name]
    literals = [kind for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal]
    return Bounds(choices=get_args(literals[0]) if literals else ())


@cache
def field_texts(owner: type) -> dict[str, str]:
    """Returns the docstrings below the fields of a dataclass, inherited ones too, with bounds."""
    texts: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            source = inspect.getsource(base)
        except OSError:  # of make_dataclass
            continue
        definition = ast.parse(textwrap.dedent(source)).body[0]
        assert isinstance(definition, ast.ClassDef)
        for field, text in pairwise(definition.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                words = " ".join(ast.literal_eval(text.value).split())
                texts[ast.unparse(field.target)] = words
    for name in texts:
        bounds = bounds_of(owner, name) if name in _fields(owner) else Bounds()
        if limits := str(bounds):
            texts[name] += f" One of {limits}." if bounds.choices else f" {limits.capitalize()}."
    return texts


@cache
def _fields(owner: type) -> dict[str, dataclasses.Field]:
    return {field.name: field for field in dataclasses.fields(owner)}


@cache
def _hints(owner: type) -> dict[str, Any]:
    return get_type_hints(owner)


def _has_type(value: Any, hint: Any) -> bool:
    """Whether a value has a type; numpy's numbers count as Python's, booleans not as numbers."""
    if get_origin(hint) is tuple and get_args(hint)[1:] == (...,):  # beartype checks one item only
        item = get_args(hint)[0]
        return isinstance(value, tuple) and all(_has_type(entry, item) for entry in value)
    from beartype.door import is_bearable  # slow to import

    return is_bearable(value, hint, conf=_beartype_options())


@cache
def _beartype_options() -> Any:
    from beartype import BeartypeConf, FrozenDict
    from beartype.vale import Is

    is_number = Is[lambda value: not isinstance(value, bool)]
    kinds = {int: Annotated[Integral, is_number], float: Annotated[Real, is_number]}
    return BeartypeConf(hint_overrides=FrozenDict(kinds))


def _type_name(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_type_name, get_args(hint)))
    text = str(hint) if get_args(hint) else getattr(hint, "__name__", str(hint))
    name = "None" if hint is NoneType else "of type " + re.sub(r"\b[\w.]+\.(?=\w)", "", text)
    return TYPE_NAMES.get(hint, name)
