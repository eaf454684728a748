"""The checks by which claims are compared with measurements.

Each is a frozen dataclass of contestants and a bar; called with what was measured, it finds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from specjax.bench.claims.findings import (
    ALL_KINDS,
    Check,
    Finding,
    Measured,
    PerPrompt,
    Spread,
    Verdict,
    bootstrap,
    decide,
)
from specjax.bench.measure import PLAIN, Sample, Text
from specjax.bench.oracle import drafted_lengths
from specjax.bench.summary import ALL

# ---- Speed -------------------------------------------------------------------------------------


def paired_speeds(
    own: Sequence[Sample], other: Sequence[Sample], on: Sequence[str]
) -> dict[int, list[float]]:
    """By prompt, the speed of `own` over that of `other` in each pair of runs."""
    partners = {(each.number, each.repeat): each for each in other}
    found: dict[int, list[float]] = {}
    for each in own:
        if each.batch[0].kind in on:
            partner = partners[each.number, each.repeat]
            ratio = each.num_tokens / each.seconds * partner.seconds / partner.num_tokens
            found.setdefault(each.number, []).append(ratio)
    return found


def quartiles(values: Sequence[float]) -> Spread:
    """The median between the quartiles."""
    low, middle, high = (float(value) for value in np.percentile(values, (25, 50, 75)))
    return Spread(middle, low, high)


@dataclass(frozen=True)
class Faster(Check):
    """`first` says more tokens per second than `second`; prefill counts."""

    first: str
    second: str
    on: tuple[str, ...] = ALL_KINDS
    temperature: float = 0.0
    bar: float = 1.0

    def __call__(self, measured: Measured) -> Finding:
        samples = measured.samples[self.temperature]
        pairs = paired_speeds(samples[self.first], samples[self.second], self.on)
        ratios = [ratio for of_prompt in pairs.values() for ratio in of_prompt]
        spread = quartiles(ratios)
        return Finding(spread, f"speed x {spread}", decide(spread, self.bar, len(ratios)))


@dataclass(frozen=True)
class GainsMoreOn(Check):
    """What a method gains in speed over plain decoding is more on some tasks than on others."""

    method: str
    on: tuple[str, ...]
    than_on: tuple[str, ...]

    def __call__(self, measured: Measured) -> Finding:
        samples = measured.samples[0.0]

        def gains(kinds: Sequence[str]) -> PerPrompt:
            pairs = paired_speeds(samples[self.method], samples[PLAIN], kinds)
            return np.array([[median(ratios)] for ratios in pairs.values()])

        def ratio(some: PerPrompt, others: PerPrompt) -> float:
            return float(np.median(some) / np.median(others))

        groups = gains(self.on), gains(self.than_on)
        spread = bootstrap(ratio, groups, measured.seed)
        some, others = (float(np.median(group)) for group in groups)
        verdict = decide(spread, 1.0, min(map(len, groups)))
        return Finding(spread, f"{some:.2f}x / {others:.2f}x = {spread}", verdict)


# ---- Acceptance --------------------------------------------------------------------------------


def once(samples: Sequence[Sample], on: Sequence[str]) -> list[Text]:
    """What was said to each prompt in the first turn."""
    return [each.texts[0] for each in samples if each.repeat == 0 and each.batch[0].kind in on]


def lengths(samples: Sequence[Sample], on: Sequence[str]) -> PerPrompt:
    """New tokens and rounds of each prompt."""
    return np.array([[len(text.tokens), text.rounds] for text in once(samples, on)], float)


def share(counts: PerPrompt) -> float:
    """The sum of the first of two columns over that of the second, with 0 for 0 over 0."""
    first, second = counts.sum(axis=0)
    return float(first / max(second, 1.0))


def share_ratio(counts: PerPrompt) -> float:
    """The `share` of the first two columns over that of the next two."""
    return share(counts[:, :2]) / max(share(counts[:, 2:]), 1e-9)


@dataclass(frozen=True)
class AcceptsMore(Check):
    """The accepted length of `first` is larger than `bar` times that of `second`."""

    first: str
    second: str
    on: tuple[str, ...] = ALL_KINDS
    temperature: float = 0.0
    second_temperature: float | None = None  # by default the same
    bar: float = 1.0

    def __call__(self, measured: Measured) -> Finding:
        other = self.temperature if self.second_temperature is None else self.second_temperature
        own = lengths(measured.samples[self.temperature][self.first], self.on)
        counts = np.hstack([own, lengths(measured.samples[other][self.second], self.on)])
        return _compared(counts, self.bar, measured.seed)


@dataclass(frozen=True)
class AcceptsMoreDeeper(Check):
    """From `depth` on, more of the drafts of `first` that got so far are accepted."""

    first: str
    second: str
    depth: int
    temperature: float = 0.0

    def __call__(self, measured: Measured) -> Finding:
        samples = measured.samples[self.temperature]
        columns = [self._counts(samples[name]) for name in (self.first, self.second)]
        return _compared(np.hstack(columns), 1.0, measured.seed)

    def _counts(self, samples: Sequence[Sample]) -> PerPrompt:
        """Accepted and judged drafted tokens of those depths, of each prompt."""
        found = []
        for text in once(samples, ALL_KINDS):
            at_least = np.cumsum(text.accepted_lengths[::-1])[::-1]  # rounds of n tokens or more
            found.append([at_least[self.depth + 1 :].sum(), at_least[self.depth : -1].sum()])
        return np.array(found, float)


@dataclass(frozen=True)
class GainsMore(Check):
    """A change lengthens what one method accepts by a larger factor than what another does."""

    change: tuple[str, str]  # after, before
    other: tuple[str, str]
    on: tuple[str, ...]

    def __call__(self, measured: Measured) -> Finding:
        samples = measured.samples[0.0]
        names = (*self.change, *self.other)
        counts = np.hstack([lengths(samples[name], self.on) for name in names])

        def ratio(drawn: PerPrompt) -> float:
            return share_ratio(drawn[:, :4]) / share_ratio(drawn[:, 4:])

        spread = bootstrap(ratio, [counts], measured.seed)
        own, other = share_ratio(counts[:, :4]), share_ratio(counts[:, 4:])
        ours = f"x {own:.2f} / x {other:.2f} = {spread}"
        return Finding(spread, ours, decide(spread, 1.0, len(counts)))


def _compared(counts: PerPrompt, bar: float, seed: int) -> Finding:
    spread = bootstrap(share_ratio, [counts], seed)
    first, second = share(counts[:, :2]), share(counts[:, 2:])
    ours = f"{first:.2f} / {second:.2f} = {spread}"
    return Finding(spread, ours, decide(spread, bar, len(counts)))


# ---- Draft lengths, time to draft, equality ----------------------------------------------------


@dataclass(frozen=True)
class Varies(Check):
    """The drafts of the oracle vary in length: standard deviation over mean."""

    oracle: str
    bar: float

    def __call__(self, measured: Measured) -> Finding:
        drafted = [
            np.array(drafted_lengths(text.from_draft), float)
            for text in once(measured.samples[0.0][self.oracle], ALL_KINDS)
        ]
        counts = np.array([[len(each), each.sum(), (each**2).sum()] for each in drafted])

        def variation(drawn: PerPrompt) -> float:
            count, total, squares = drawn.sum(axis=0)
            mean = total / max(count, 1.0)
            return float(np.sqrt(max(squares / max(count, 1.0) - mean**2, 0.0)) / max(mean, 1e-9))

        spread = bootstrap(variation, [counts], measured.seed)
        mean = share(counts[:, [1, 0]])
        ours = f"{mean:.1f} ± {spread.figure * mean:.1f}, ratio {spread}"
        return Finding(spread, ours, decide(spread, self.bar, len(counts)))


@dataclass(frozen=True)
class Foretells(Check):
    """The classifier's F1 of acceptance is above that of the best static length."""

    def __call__(self, measured: Measured) -> Finding:
        def f1(drawn: PerPrompt, first: int) -> float:
            accepted, predicted, right = drawn[:, [0, first, first + 1]].sum(axis=0)
            return 2 * right / max(accepted + predicted, 1.0)

        def gain(drawn: PerPrompt) -> float:
            return float(f1(drawn, 1) - f1(drawn, 3))

        counts = measured.foretold
        spread = bootstrap(gain, [counts], measured.seed)
        ours = f"{f1(counts, 1):.2f} - {f1(counts, 3):.2f} = {spread}"
        return Finding(spread, ours, decide(spread, 0.0, len(counts)))


@dataclass(frozen=True)
class DraftsFaster(Check):
    """A round of `first` drafts in less than `bar` times what a round of `second` takes for it."""

    first: str
    second: str
    bar: float = 1.0

    def __call__(self, measured: Measured) -> Finding:
        times = [
            quartiles([each.draft for each in measured.traces[name].rounds])
            for name in (self.first, self.second)
        ]
        own, other = times
        spread = Spread(own.figure / other.figure, own.low / other.high, own.high / other.low)
        ours = f"{own.figure * 1e3:.1f} / {other.figure * 1e3:.1f} ms = {spread}"
        count = min(len(measured.traces[name].rounds) for name in (self.first, self.second))
        return Finding(spread, ours, decide(spread, self.bar, count, is_below=True))


@dataclass(frozen=True)
class DraftsInLess(Check):
    """Drafting takes less than the share `bar` of a round."""

    method: str
    bar: float

    def __call__(self, measured: Measured) -> Finding:
        rounds = measured.traces[self.method].rounds
        spread = quartiles([each.draft / (each.draft + each.verify + each.rest) for each in rounds])
        ours = f"{spread.figure:.1%} of a round ({spread.low:.1%}-{spread.high:.1%})"
        return Finding(spread, ours, decide(spread, self.bar, len(rounds), is_below=True))


@dataclass(frozen=True)
class SameTokens(Check):
    """Every method says what plain decoding says with the same key; one text decides against."""

    temperature: float

    def __call__(self, measured: Measured) -> Finding:
        found = measured.rows[self.temperature]
        last_task = ALL if any(row.task == ALL for row in found) else found[-1].task
        rows = [row for row in found if row.task == last_task and row.method != PLAIN]
        count = sum(row.num_prompts for row in rows)
        different = sum(row.num_different for row in rows)
        near_ties = sum(row.num_near_ties for row in rows)
        ours = f"{different} of {count} texts differ, {len(rows)} methods and settings"
        ours += f"; {near_ties} more at near ties of 16-bit arithmetic" if near_ties else ""
        figure = different / max(count, 1)
        verdict = Verdict.FAILS if different else Verdict.HOLDS if count else Verdict.UNDECIDED
        return Finding(Spread(figure, figure, figure), ours, verdict)
