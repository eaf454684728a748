"""Curves of swept settings, kept as lines of JSON in a benchmark's folder."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from specjax.core.folder import Record, RunFolder

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
    """Adds a curve to those in the folder; one of the same title is replaced."""
    others = [other for other in read_curves(folder) if other.title != curve.title]
    RunFolder(folder).write_records(CURVES, map(asdict, [*others, curve]))


def read_curves(folder: Path) -> list[Curve]:
    """Returns the curves in the folder."""
    return list(RunFolder(folder).records(CURVES, _curve))


def _curve(line: Record) -> Curve:
    series = {name: [Point(*point) for point in line["series"][name]] for name in line["series"]}
    return Curve(line["title"], line["setting"], series)
