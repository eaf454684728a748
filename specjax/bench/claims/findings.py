"""Claims, and what measurements say of them: a figure, its spread, and whether the claim holds.

A check compares a figure with the bar that the claim sets. Its spread decides: see `RULE`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from specjax.bench.measure import Sample
from specjax.bench.rounds import Trace
from specjax.bench.summary import Measurement
from specjax.bench.tasks import COMPLETE
from specjax.pocket import edits

EDITS = edits.KINDS  # input-guided: most of the output stands in the prompt
FREE = (COMPLETE,)
ALL_KINDS = (*EDITS, *FREE)
NUM_DRAWS = 2000
INTERVAL = (5, 95)  # percent of the draws
CLOSE = 0.95  # a figure within 5% counts as about the same
LEAST = 3  # prompts, or pairs of runs, without which nothing is decided

RULE = (
    "A claim sets a bar: a ratio of 1 (a difference of 0), or what its line names. It holds if the "
    "whole spread is beyond the bar, does not hold if the whole spread falls short of it, and is "
    f"undecided otherwise, or with fewer than {LEAST} prompts. Spread of speeds: the quartiles of "
    "the ratio in pairs of runs (same prompt, same turn). Of all that is counted per prompt: "
    f"{INTERVAL[1] - INTERVAL[0]}% of {NUM_DRAWS} bootstrap draws of prompts. Of the time to "
    "draft: quartile over opposite quartile of the rounds. Accepted lengths count the bonus token."
)

PerPrompt = Float[np.ndarray, "_ _"]  # a row of numbers for each prompt


class Verdict(StrEnum):
    """What becomes of a claim."""

    HOLDS = "holds"
    FAILS = "does not hold"
    UNDECIDED = "undecided"
    NOT_CHECKED = "not checked here"


class Spread(NamedTuple):
    """A figure and the range in which it could as well have come out."""

    figure: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.figure:.2f} ({self.low:.2f}-{self.high:.2f})"


class Finding(NamedTuple):
    """What was measured for a claim."""

    spread: Spread
    ours: str  # the same, as tables tell it
    verdict: Verdict


@dataclass(frozen=True)
class Measured:
    """All that checks read. Runs are of one prompt each."""

    samples: Mapping[float, Mapping[str, Sequence[Sample]]]  # by temperature and contestant
    rows: Mapping[float, Sequence[Measurement]]  # their summary
    traces: Mapping[str, Trace]
    # At temperature 0, per prompt: tokens that the draft had right; those that the classifier
    # foretold, and the right ones among them; the same of the best static length.
    foretold: PerPrompt
    seed: int = 0  # of the bootstrap


class Check(ABC):
    """How a claim is compared with measurements; a frozen dataclass of names and a bar."""

    @abstractmethod
    def __call__(self, measured: Measured) -> Finding:
        """The finding."""


def decide(spread: Spread, bar: float, count: int, is_below: bool = False) -> Verdict:
    """By `RULE`; `count` is that of prompts or pairs, and `is_below` turns the bar round."""
    if count < LEAST:
        return Verdict.UNDECIDED
    is_higher, is_lower = spread.low > bar, spread.high < bar
    if is_higher or is_lower:
        return Verdict.HOLDS if is_lower == is_below else Verdict.FAILS
    return Verdict.UNDECIDED


def bootstrap(
    statistic: Callable[..., float], groups: Sequence[PerPrompt], seed: int = 0
) -> Spread:
    """The statistic of all prompts, and its range if other prompts of each group had been asked."""
    random = np.random.default_rng(seed)
    draws = [
        statistic(*(group[random.integers(len(group), size=len(group))] for group in groups))
        for _ in range(NUM_DRAWS)
    ]
    low, high = np.percentile(draws, INTERVAL)
    return Spread(statistic(*groups), float(low), float(high))


# ---- Claims --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """One line of the report."""

    paper: str
    text: str  # in our words; it names the bar, if that is not 1
    published: str  # the figures, and where they stand
    check: Check | None = None
    missing: str = ""  # what checking it would need, if there is no check


class Line(NamedTuple):
    """A claim, and what became of it."""

    claim: Claim
    finding: Finding | None  # None: not checked here

    @property
    def verdict(self) -> Verdict:
        """In a word or two."""
        return Verdict.NOT_CHECKED if self.finding is None else self.finding.verdict

    @property
    def ours(self) -> str:
        """Our figure with its spread, or what is missing."""
        return self.claim.missing if self.finding is None else self.finding.ours


def find(claims: Sequence[Claim], measured: Measured) -> list[Line]:
    """Every claim with its finding."""
    return [Line(each, None if each.check is None else each.check(measured)) for each in claims]


def claims_of(paper: str, *rows: tuple[str, str, Check | str]) -> tuple[Claim, ...]:
    """The claims of one paper: text, published figure, and the check or what it would need."""
    return tuple(
        Claim(paper, text, published, missing=check)
        if isinstance(check, str)
        else Claim(paper, text, published, check)
        for text, published, check in rows
    )
