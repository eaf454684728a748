"""The evidence in a folder of `specjax bench --out`, and how it decides a claim: see `RULE`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from benchmarks.claims.curves import Curve, read_curves
from benchmarks.claims.traces import read_traces
from recipes.pocket import edits
from specjax.bench.measure import Sample
from specjax.bench.results import Point, read_results, read_samples
from specjax.bench.summary import Measurement, last_task_rows
from specjax.run.tasks import COMPLETE

EDITS = edits.KINDS  # input-guided: most of the output stands in the prompt
FREE = (COMPLETE,)
ALL_KINDS = (*EDITS, *FREE)


class Variant(NamedTuple):
    """A method with a setting."""

    method: str
    setting: str


VARIANTS = {
    "disco": Variant("draft-model", "rule=disco"),
    "heuristic": Variant("draft-model", "rule=heuristic"),
    **{f"static-{n}": Variant("draft-model", f"length={n}") for n in (1, 2, 3, 8)},
    "blind": Variant("eagle2", "noise_share=0"),  # ignores the noise, as published
    "blind-hass": Variant("hass", "noise_share=0"),
}
STATIC = (*(name for name in VARIANTS if name.startswith("static-")), "draft-model")
BEST_STATIC = "the fastest of STATIC"
NUM_DRAWS = 2000
INTERVAL = (5, 95)  # percent of the draws
CLOSE = 0.95  # a figure within 5% counts as about the same
MARGIN = 0.02  # of figures without a spread
MIN_COUNT = 3  # prompts or pairs of runs, below which nothing is decided

RULE = (
    "A claim sets a bar: a ratio of 1, or what its line names. It holds if the whole spread is "
    "beyond the bar, does not hold if the whole spread falls short of it, and is undecided "
    f"otherwise, or with fewer than {MIN_COUNT} prompts. Spread of speeds: the quartiles of the "
    "ratio over pairs of runs (same prompt, same turn). Of what is counted per prompt: "
    f"{INTERVAL[1] - INTERVAL[0]}% of {NUM_DRAWS} bootstrap draws of prompts. Of drafting times: "
    f"quartile over opposite quartile. Of curves, which run once: {MARGIN:.0%}. Accepted lengths "
    "include the bonus token."
)

PerPrompt = Float[np.ndarray, "_ _"]  # a row of numbers for each prompt


class NotMeasured(Exception):
    """The folder lacks the evidence; the message names the command that measures it."""


class Verdict(StrEnum):
    """The outcome of a claim."""

    HOLDS = "holds"
    FAILS = "does not hold"
    UNDECIDED = "undecided"
    NOT_MEASURED = "not measured here"


class Spread(NamedTuple):
    """A figure and the range in which it could as well have come out."""

    figure: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.figure:.2f} ({self.low:.2f}-{self.high:.2f})"


class Finding(NamedTuple):
    """The figure measured for a claim, in numbers and as tables show it, and the verdict."""

    spread: Spread
    ours: str
    verdict: Verdict


@dataclass(frozen=True)
class Evidence:
    """Everything that checks read; runs are of one prompt each."""

    samples: Mapping[float, Mapping[str, Sequence[Sample]]] = field(default_factory=dict)
    rows: Mapping[float, Sequence[Measurement]] = field(default_factory=dict)
    traces: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    curves: Sequence[Curve] = ()

    def runs(self, method: str, on: Sequence[str], temperature: float) -> list[Sample]:
        """Returns the runs of a method on these kinds of task."""
        of_method = self.samples.get(temperature, {}).get(method, ())
        runs = [run for run in of_method if run.batch[0].kind in on]
        if not runs:
            flags = f"--methods {'plain' if method == 'plain' else 'all'}"
            if method in VARIANTS:
                variant = VARIANTS[method]
                flags = f"--methods {method}={variant.method} --set {method}.{variant.setting}"
            raise NotMeasured(f"specjax bench {flags} --temperature {temperature:g} --out FOLDER")
        return runs

    def best_static(self) -> str:
        """Returns the method with the fixed draft length that is fastest over all tasks."""
        for method in STATIC:
            self.runs(method, ALL_KINDS, 0.0)  # raises NotMeasured
        speeds = {row.method: row.ratio for row in last_task_rows(self.rows[0.0])}
        return max(STATIC, key=speeds.__getitem__)

    def trace(self, method: str) -> Mapping[str, Any]:
        """Returns the times of a method's rounds; raises NotMeasured."""
        if "draft_quartiles" not in self.traces.get(method, {}):
            raise NotMeasured("python -m benchmarks.claims.traces --out FOLDER")
        return self.traces[method]

    def point(self, setting: str, series: str, value: Any) -> Point:
        """Returns a point of a swept setting, or the best for the value "best"."""
        for curve in self.curves:
            points = curve.series.get(series, ()) if curve.setting == setting else ()
            if value == "best" and points:
                return max(points, key=lambda point: point.accepted_length)
            for point in points:
                if point.value == value:
                    return point
        raise NotMeasured("python -m benchmarks.claims.ablations --out FOLDER")


def read_evidence(folder: Path) -> Evidence:
    """Reads the folder of a benchmark; only batch size 1 counts."""
    results = read_results(folder)
    samples: dict[float, dict[str, list[Sample]]] = {}
    for condition, runs in read_samples(folder).items():
        for run in runs if condition.batch_size == 1 else ():
            samples.setdefault(condition.temperature, {}).setdefault(run.method, []).append(run)
    rows: dict[float, list[Measurement]] = {}
    for row in results.rows:
        if row.batch == 1:
            rows.setdefault(row.temperature, []).append(row)
    return Evidence(samples, rows, read_traces(folder), read_curves(folder))


def decide(spread: Spread, bar: float, count: int, is_below: bool = False) -> Verdict:
    """Decides by `RULE`; `count` is that of prompts or pairs, `is_below` reverses the bar."""
    if count < MIN_COUNT:
        return Verdict.UNDECIDED
    is_higher, is_lower = spread.low > bar, spread.high < bar
    if is_higher or is_lower:
        return Verdict.HOLDS if is_lower == is_below else Verdict.FAILS
    return Verdict.UNDECIDED


def bootstrap(
    statistic: Callable[..., float], groups: Sequence[PerPrompt], seed: int = 0
) -> Spread:
    """Returns the statistic of all prompts, and its range over redrawn prompts of each group."""
    random = np.random.default_rng(seed)
    draws = [
        statistic(*(group[random.integers(len(group), size=len(group))] for group in groups))
        for _ in range(NUM_DRAWS)
    ]
    low, high = np.percentile(draws, INTERVAL)
    return Spread(statistic(*groups), float(low), float(high))
