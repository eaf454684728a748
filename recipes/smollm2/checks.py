"""The checks that decide the papers' claims by the runs of a benchmark.

A check is a frozen dataclass of methods and a bar. A claim holds if the whole spread is beyond the
bar, does not hold if the whole spread falls short of it, and is undecided otherwise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from recipes.papers.figures import drafted_lengths
from specjax.bench.measure import GeneratedText, Sample
from specjax.bench.results import read_samples

NUM_DRAWS = 2000
INTERVAL = (5, 95)  # percent of the draws
MIN_COUNT = 3  # questions or pairs of runs, below which nothing is decided

PerPrompt = Float[np.ndarray, "_ _"]  # a row of numbers for each question
Samples = Mapping[float, Mapping[str, Sequence[Sample]]]  # of each method, by temperature


class NotMeasured(Exception):
    """A folder lacks the runs of a method."""


class Verdict(StrEnum):
    """The outcome of a claim."""

    HOLDS = "holds"
    FAILS = "does not hold"
    UNDECIDED = "undecided"


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


Check = Callable[[Samples], Finding]  # raises NotMeasured


def samples_in(folder: Path) -> Samples:
    """Reads the folder of a benchmark; only batch size 1 counts."""
    samples: dict[float, dict[str, list[Sample]]] = {}
    for condition, runs in read_samples(folder).items():
        for run in runs if condition.batch_size == 1 else ():
            samples.setdefault(condition.temperature, {}).setdefault(run.method, []).append(run)
    return samples


def runs_of(
    samples: Samples, method: str, on: Sequence[str], temperature: float = 0.0
) -> list[Sample]:
    """Returns the runs of a method on these kinds of questions; raises NotMeasured."""
    of_method = samples.get(temperature, {}).get(method, ())
    if runs := [run for run in of_method if run.batch[0].kind in on]:
        return runs
    raise NotMeasured(f"there are no runs of {method} at temperature {temperature:g}")


def decide(spread: Spread, bar: float, count: int) -> Verdict:
    """Decides a claim; `count` is that of questions or pairs of runs."""
    if count < MIN_COUNT or spread.low <= bar <= spread.high:
        return Verdict.UNDECIDED
    return Verdict.HOLDS if spread.low > bar else Verdict.FAILS


def bootstrap(statistic: Callable[[PerPrompt], float], counts: PerPrompt, seed: int = 0) -> Spread:
    """Returns the statistic of all questions, and its range over redrawn ones."""
    random = np.random.default_rng(seed)
    draws = [
        statistic(counts[random.integers(len(counts), size=len(counts))]) for _ in range(NUM_DRAWS)
    ]
    low, high = np.percentile(draws, INTERVAL)
    return Spread(statistic(counts), float(low), float(high))


@dataclass(frozen=True)
class Comparison:
    """Two methods, the kinds of questions they are compared on, and the ratio that is the bar."""

    first: str
    second: str
    on: tuple[str, ...]
    temperature: float = 0.0
    bar: float = 1.0


# ---- Speed -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Faster(Comparison):
    """`first` generates more tokens per second than `second`; prefill counts.

    The spread is that of the quartiles over pairs of runs: the same question in the same turn.
    """

    def __call__(self, samples: Samples) -> Finding:
        first, second = (
            runs_of(samples, name, self.on, self.temperature) for name in (self.first, self.second)
        )
        partners = {sample.trial: sample for sample in second}
        ratios = [sample.speed / partners[sample.trial].speed for sample in first]
        low, middle, high = (float(value) for value in np.percentile(ratios, (25, 50, 75)))
        spread = Spread(middle, low, high)
        return Finding(spread, f"speed x {spread}", decide(spread, self.bar, len(ratios)))


# ---- Acceptance, with the spread of a bootstrap over questions -----------------------------------


def first_texts(runs: Sequence[Sample]) -> list[GeneratedText]:
    """Returns the text of each question in its first repeat."""
    return [run.texts[0] for run in runs if run.repeat == 0]


def share(counts: PerPrompt) -> float:
    """Returns the sum of the first of two columns over that of the second; 0 for 0 over 0."""
    first, second = counts.sum(axis=0)
    return float(first / max(second, 1.0))


def share_ratio(counts: PerPrompt) -> float:
    """Returns the `share` of the first two columns over that of the next two."""
    return share(counts[:, :2]) / max(share(counts[:, 2:]), 1e-9)


def _compared(counts: PerPrompt, bar: float) -> Finding:
    spread = bootstrap(share_ratio, counts)
    first, second = share(counts[:, :2]), share(counts[:, 2:])
    ours = f"{first:.2f} / {second:.2f} = {spread}"
    return Finding(spread, ours, decide(spread, bar, len(counts)))


@dataclass(frozen=True)
class AcceptsMore(Comparison):
    """The accepted length of `first` is larger than `bar` times that of `second`."""

    def __call__(self, samples: Samples) -> Finding:
        columns = []
        for name in (self.first, self.second):
            texts = first_texts(runs_of(samples, name, self.on, self.temperature))
            columns.append(np.array([[len(text.tokens), text.rounds] for text in texts], float))
        return _compared(np.hstack(columns), self.bar)


@dataclass(frozen=True)
class AcceptsMoreDeeper:
    """From `depth` on, more of the drafts of `first` that got that far are accepted."""

    first: str
    second: str
    on: tuple[str, ...]
    depth: int

    def __call__(self, samples: Samples) -> Finding:
        names = self.first, self.second
        columns = [self._counts(runs_of(samples, name, self.on)) for name in names]
        if not all(column[:, 1].any() for column in columns):
            raise NotMeasured(f"no draft of {names} is longer than {self.depth}")
        return _compared(np.hstack(columns), 1.0)

    def _counts(self, runs: Sequence[Sample]) -> PerPrompt:
        """Returns accepted and verified drafted tokens of those depths, of each question."""
        counts = []
        for text in first_texts(runs):
            at_least = np.cumsum(text.accepted_lengths[::-1])[::-1]  # rounds of n tokens or more
            counts.append([at_least[self.depth + 1 :].sum(), at_least[self.depth : -1].sum()])
        return np.array(counts, float)


@dataclass(frozen=True)
class DraftsVary:
    """The deviation of the draft lengths of `method`, over their mean, is larger than `bar`."""

    method: str
    on: tuple[str, ...]
    bar: float

    def __call__(self, samples: Samples) -> Finding:
        texts = first_texts(runs_of(samples, self.method, self.on))
        lengths = [np.array(drafted_lengths(text.from_draft), float) for text in texts]

        def variation(sums: PerPrompt) -> float:
            count, total, squares = sums.sum(axis=0)
            return float(np.sqrt(squares / count - (total / count) ** 2) / (total / count))

        sums = np.array([[len(x), x.sum(), (x**2).sum()] for x in lengths])
        spread = bootstrap(variation, sums)
        return Finding(spread, str(spread), decide(spread, self.bar, len(sums)))
