"""Curves of settings that were swept, kept as lines of JSON in a benchmark's folder."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from specjax.bench.results import read_lines, replace_lines
from specjax.core.errors import SpecjaxError

CURVES = "curves.jsonl"


class Point(NamedTuple):
    """The outcome of one value of a setting over all prompts."""

    value: Any
    accepted_length: float
    tokens_per_second: float  # prefill counts, compiling does not


@dataclass(frozen=True)
class Curve:
    """One swept setting; a series per method, over the same values."""

    title: str
    setting: str
    series: Mapping[str, Sequence[Point]] = field(default_factory=dict)


def keep_curve(folder: Path, curve: Curve) -> None:
    """Adds a curve to those in the folder; one of the same title is replaced.

    Raises:
        SpecjaxError: if the file is damaged or cannot be written.
    """
    others = [each for each in read_curves(folder) if each.title != curve.title]
    replace_lines(folder / CURVES, map(asdict, [*others, curve]))


def read_curves(folder: Path) -> list[Curve]:
    """Returns the curves in the folder; none if there is no such file.

    Raises:
        SpecjaxError: if the file cannot be read, or a line of it is damaged.
    """
    curves = []
    for number, values in enumerate(read_lines(folder / CURVES), 1):
        try:
            series = {
                name: [Point(*point) for point in points]
                for name, points in values["series"].items()
            }
            curves.append(Curve(values["title"], values["setting"], series))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SpecjaxError(
                f"{folder / CURVES}:{number} is damaged ({error}); delete this line and tune again"
            ) from None
    return curves
