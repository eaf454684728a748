"""The checks that compare claims with evidence: frozen dataclasses of methods and a bar."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.claims.evidence import (
    ALL_KINDS,
    BEST_STATIC,
    MARGIN,
    Evidence,
    Finding,
    NotMeasured,
    PerPrompt,
    Spread,
    Verdict,
    bootstrap,
    decide,
)
from specjax.bench.measure import PLAIN, GeneratedText, Sample
from specjax.bench.summary import last_task_rows

Check = Callable[[Evidence], Finding]  # raises NotMeasured


# ---- Speed -------------------------------------------------------------------------------------


def paired_speeds(samples: Sequence[Sample], others: Sequence[Sample]) -> dict[int, list[float]]:
    """Returns, by prompt, the speed of `samples` over that of `others` in each pair of runs."""
    partners = {sample.trial: sample for sample in others}
    ratios: dict[int, list[float]] = {}
    for sample in samples:
        ratios.setdefault(sample.number, []).append(sample.speed / partners[sample.trial].speed)
    return ratios


@dataclass(frozen=True)
class Faster:
    """`first` generates more tokens per second than `second`; prefill counts.

    `second` may be BEST_STATIC.
    """

    first: str
    second: str
    on: tuple[str, ...] = ALL_KINDS
    temperature: float = 0.0
    bar: float = 1.0

    def __call__(self, evidence: Evidence) -> Finding:
        second = evidence.best_static() if self.second == BEST_STATIC else self.second
        groups = [evidence.runs(name, self.on, self.temperature) for name in (self.first, second)]
        ratios = [ratio for pairs in paired_speeds(*groups).values() for ratio in pairs]
        low, middle, high = (float(value) for value in np.percentile(ratios, (25, 50, 75)))
        spread = Spread(middle, low, high)
        ours = f"speed x {spread}" + f" over {second}" * (second != self.second)
        return Finding(spread, ours, decide(spread, self.bar, len(ratios)))


@dataclass(frozen=True)
class GainsMoreOn:
    """A method gains more speed over plain decoding on some tasks than on others."""

    method: str
    on: tuple[str, ...]
    than_on: tuple[str, ...]

    def __call__(self, evidence: Evidence) -> Finding:
        def gains(kinds: Sequence[str]) -> PerPrompt:
            runs, plain = (evidence.runs(name, kinds, 0.0) for name in (self.method, PLAIN))
            return np.array([[median(ratios)] for ratios in paired_speeds(runs, plain).values()])

        def ratio(some: PerPrompt, others: PerPrompt) -> float:
            return float(np.median(some) / np.median(others))

        groups = gains(self.on), gains(self.than_on)
        spread = bootstrap(ratio, groups)
        some, others = (float(np.median(group)) for group in groups)
        verdict = decide(spread, 1.0, min(map(len, groups)))
        return Finding(spread, f"{some:.2f}x / {others:.2f}x = {spread}", verdict)


# ---- Acceptance --------------------------------------------------------------------------------


def first_texts(runs: Sequence[Sample]) -> list[GeneratedText]:
    """Returns the text of each prompt in its first repeat."""
    return [run.texts[0] for run in runs if run.repeat == 0]


def lengths(runs: Sequence[Sample]) -> PerPrompt:
    """Returns new tokens and rounds of each prompt."""
    return np.array([[len(text.tokens), text.rounds] for text in first_texts(runs)], float)


def share(counts: PerPrompt) -> float:
    """Returns the sum of the first of two columns over that of the second; 0 for 0 over 0."""
    first, second = counts.sum(axis=0)
    return float(first / max(second, 1.0))


def share_ratio(counts: PerPrompt) -> float:
    """Returns the `share` of the first two columns over that of the next two."""
    return share(counts[:, :2]) / max(share(counts[:, 2:]), 1e-9)


def _compared(counts: PerPrompt, bar: float) -> Finding:
    spread = bootstrap(share_ratio, [counts])
    first, second = share(counts[:, :2]), share(counts[:, 2:])
    ours = f"{first:.2f} / {second:.2f} = {spread}"
    return Finding(spread, ours, decide(spread, bar, len(counts)))


@dataclass(frozen=True)
class AcceptsMore:
    """The accepted length of `first` is larger than `bar` times that of `second`."""

    first: str
    second: str
    on: tuple[str, ...] = ALL_KINDS
    temperature: float = 0.0
    second_temperature: float | None = None  # by default the same
    bar: float = 1.0

    def __call__(self, evidence: Evidence) -> Finding:
        other = self.temperature if self.second_temperature is None else self.second_temperature
        first = lengths(evidence.runs(self.first, self.on, self.temperature))
        counts = np.hstack([first, lengths(evidence.runs(self.second, self.on, other))])
        return _compared(counts, self.bar)


@dataclass(frozen=True)
class AcceptsMoreDeeper:
    """From `depth` on, more of the drafts of `first` that got that far are accepted."""

    first: str
    second: str
    depth: int
    on: tuple[str, ...] = ALL_KINDS

    def __call__(self, evidence: Evidence) -> Finding:
        names = self.first, self.second
        columns = [self._counts(evidence.runs(name, self.on, 0.0)) for name in names]
        if not all(column[:, 1].any() for column in columns):
            settings = " ".join(f"--set {name}.depth={self.depth}" for name in names)
            raise NotMeasured(f"specjax bench --methods all {settings} --out FOLDER")
        return _compared(np.hstack(columns), 1.0)

    def _counts(self, runs: Sequence[Sample]) -> PerPrompt:
        """Returns accepted and verified drafted tokens of those depths, of each prompt."""
        counts = []
        for text in first_texts(runs):
            at_least = np.cumsum(text.accepted_lengths[::-1])[::-1]  # rounds of n tokens or more
            counts.append([at_least[self.depth + 1 :].sum(), at_least[self.depth : -1].sum()])
        return np.array(counts, float)


# ---- Curves of settings ------------------------------------------------------------------------


@dataclass(frozen=True)
class Spot:
    """A value of a swept setting; "best" is that with the largest accepted length."""

    setting: str
    series: str
    value: int | float | str


@dataclass(frozen=True)
class Sweep:
    """A curve is higher at one value than at another, or gains more than another curve."""

    first: Spot
    second: Spot
    than: tuple[Spot, Spot] | None = None
    is_speed: bool = False
    bar: float = 1.0

    def __call__(self, evidence: Evidence) -> Finding:
        def figure(spot: Spot) -> float:
            point = evidence.point(spot.setting, spot.series, spot.value)
            return point.tokens_per_second if self.is_speed else point.accepted_length

        first, second = figure(self.first), figure(self.second)
        ratio, ours = first / second, f"{first:.2f} / {second:.2f}"
        if self.than is not None:
            other = figure(self.than[0]) / figure(self.than[1])
            ratio, ours = ratio / other, f"x {ratio:.2f} / x {other:.2f}"
        spread = Spread(ratio, ratio * (1 - MARGIN), ratio * (1 + MARGIN))
        return Finding(spread, f"{ours} = {spread}", decide(spread, self.bar, MARGIN_COUNT))


MARGIN_COUNT = 100  # a curve pools many prompts


# ---- Drafting time, equality -------------------------------------------------------------------


@dataclass(frozen=True)
class DraftsFaster:
    """A round of `first` drafts in less than `bar` times the time that `second` takes."""

    first: str
    second: str
    bar: float = 1.0

    def __call__(self, evidence: Evidence) -> Finding:
        first, second = (evidence.trace(name) for name in (self.first, self.second))
        (low, high), (other_low, other_high) = first["draft_quartiles"], second["draft_quartiles"]
        figures = first["draft_seconds"], second["draft_seconds"]
        spread = Spread(figures[0] / figures[1], low / other_high, high / other_low)
        ours = f"{figures[0] * 1e3:.1f} / {figures[1] * 1e3:.1f} ms = {spread}"
        count = min(first["num_rounds"], second["num_rounds"])
        return Finding(spread, ours, decide(spread, self.bar, count, is_below=True))


@dataclass(frozen=True)
class DraftsInLess:
    """Drafting takes less than the share `bar` of a round."""

    method: str
    bar: float

    def __call__(self, evidence: Evidence) -> Finding:
        trace = evidence.trace(self.method)
        low, middle, high = trace["draft_share_quartiles"]
        spread = Spread(middle, low, high)
        ours = f"{middle:.1%} of a round ({low:.1%}-{high:.1%})"
        return Finding(spread, ours, decide(spread, self.bar, trace["num_rounds"], is_below=True))


@dataclass(frozen=True)
class SameTokens:
    """Every method's text is plain decoding's with the same key; one other text decides."""

    temperature: float

    def __call__(self, evidence: Evidence) -> Finding:
        measured = evidence.rows.get(self.temperature, ())
        rows = [row for row in last_task_rows(measured) if row.method != PLAIN and row.is_compared]
        if not rows:
            raise NotMeasured(
                f"specjax bench --methods all --temperature {self.temperature:g} --out FOLDER"
            )
        count = sum(row.num_prompts for row in rows)
        different = sum(row.num_different for row in rows)
        near_ties = sum(row.num_near_ties for row in rows)
        ours = f"{different} of {count} texts differ, {len(rows)} methods"
        ours += f"; {near_ties} more at near ties of 16-bit arithmetic" if near_ties else ""
        figure = different / count
        verdict = Verdict.FAILS if different else Verdict.HOLDS
        return Finding(Spread(figure, figure, figure), ours, verdict)
