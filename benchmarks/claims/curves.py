"""The curves of swept settings, in a file beside the results of a benchmark."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from specjax.bench.results import Point
from specjax.core.folder import Record, RunFolder

CURVES = "curves.jsonl"


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

    def convert(line: Record) -> Curve:
        series = {
            name: [Point(*point) for point in line["series"][name]] for name in line["series"]
        }
        return Curve(line["title"], line["setting"], series)

    return list(RunFolder(folder).records(CURVES, convert))
