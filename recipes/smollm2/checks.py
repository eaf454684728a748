"""The checks that decide the papers' claims by the runs of a benchmark.

A check takes the runs of one or two methods and a bar. A claim holds if the whole spread is beyond
the bar, does not hold if the whole spread falls short of it, and is undecided otherwise.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from recipes.papers.figures import drafted_lengths
from specjax import SpecjaxError
from specjax.bench.measure import GeneratedText, Sample
from specjax.bench.results import Condition

NUM_DRAWS = 2000
INTERVAL = (5, 95)  # percent of the draws
MIN_COUNT = 3  # questions or pairs of runs, below which nothing is decided

PerPrompt = Float[np.ndarray, "_ _"]  # a row of numbers for each question
Samples = Mapping[Condition, Sequence[Sample]]


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


def runs_of(samples: Samples, method: str, on: Sequence[str], temperature: float) -> list[Sample]:
    """Returns the runs of a method on these kinds of questions; only batch size 1 counts."""
    at_temperature = samples.get(Condition(temperature, 1), ())
    runs = [run for run in at_temperature if run.method == method and run.batch[0].kind in on]
    if not runs:
        raise SpecjaxError(
            f"there are no runs of {method} on {', '.join(on)} at temperature {temperature:g}; run "
            "the command again"
        )
    if len({(run.trial, run.batch[0].kind) for run in runs}) < len(runs):
        raise SpecjaxError(f"{method} was measured twice on the same questions; delete the results")
    return runs


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


def faster(first: Sequence[Sample], second: Sequence[Sample], bar: float = 1.0) -> Finding:
    """Decides whether `first` generates more tokens per second than `second`; prefill counts.

    The spread is that of the quartiles over pairs of runs: the same question in the same turn.
    """
    partners = {sample.trial: sample for sample in second}
    ratios = [sample.speed / partners[sample.trial].speed for sample in first]
    low, middle, high = (float(value) for value in np.percentile(ratios, (25, 50, 75)))
    spread = Spread(middle, low, high)
    return Finding(spread, f"speed x {spread}", decide(spread, bar, len(ratios)))


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


def _compared(first: PerPrompt, second: PerPrompt, bar: float) -> Finding:
    counts = np.hstack([first, second])
    spread = bootstrap(share_ratio, counts)
    ours = f"{share(first):.2f} / {share(second):.2f} = {spread}"
    return Finding(spread, ours, decide(spread, bar, len(counts)))


def _counts(
    runs: Sequence[Sample], counts_of: Callable[[GeneratedText], tuple[float, float]]
) -> PerPrompt:
    return np.array([counts_of(text) for text in first_texts(runs)], float)


def accepts_more(first: Sequence[Sample], second: Sequence[Sample], bar: float = 1.0) -> Finding:
    """Decides whether `first` has an accepted length of more than `bar` times that of `second`."""

    def counts_of(text: GeneratedText) -> tuple[float, float]:
        return len(text.tokens), text.rounds

    return _compared(_counts(first, counts_of), _counts(second, counts_of), bar)


def accepts_more_deeper(first: Sequence[Sample], second: Sequence[Sample], depth: int) -> Finding:
    """Decides whether, from `depth` on, more of the drafts that get there are accepted."""

    def counts_of(text: GeneratedText) -> tuple[float, float]:  # accepted, verified
        at_least = np.cumsum(text.accepted_lengths[::-1])[::-1]  # rounds of n tokens or more
        return at_least[depth + 1 :].sum(), at_least[depth:-1].sum()

    counts = [_counts(runs, counts_of) for runs in (first, second)]
    for runs, verified in zip((first, second), counts, strict=True):
        if not verified[:, 1].any():
            raise SpecjaxError(
                f"no draft of {runs[0].method} is longer than {depth}; lower the claim's depth"
            )
    return _compared(counts[0], counts[1], 1.0)


def drafts_vary(runs: Sequence[Sample], bar: float) -> Finding:
    """Decides whether the deviation of draft lengths, over their mean, is larger than `bar`."""
    lengths = [np.array(drafted_lengths(text.from_draft), float) for text in first_texts(runs)]

    def variation(sums: PerPrompt) -> float:
        count, total, squares = sums.sum(axis=0)
        return float(np.sqrt(squares / count - (total / count) ** 2) / (total / count))

    sums = np.array([[len(x), x.sum(), (x**2).sum()] for x in lengths])
    spread = bootstrap(variation, sums)
    return Finding(spread, str(spread), decide(spread, bar, len(sums)))
