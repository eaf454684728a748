"""The checks of claims: made-up runs are judged as they deserve."""

from collections.abc import Sequence

import numpy as np
import pytest

from recipes.smollm2.checks import (
    Verdict,
    accepts_more,
    accepts_more_deeper,
    bootstrap,
    drafts_vary,
    faster,
    runs_of,
    share_ratio,
)
from specjax.bench.measure import GeneratedText, Program, Sample
from specjax.bench.results import Condition, open_results, read_samples
from specjax.bench.summary import summarise
from specjax.core.errors import SpecjaxError
from specjax.run.tasks import TaskPrompt

EDITS, FREE = ("rename", "fix"), ("complete",)
KINDS = (*EDITS, *EDITS, "fix", *FREE, *FREE)
ALL = (*EDITS, *FREE)
TOKENS = tuple(range(60))


def runs(
    method: str,
    rounds: Sequence[int] = (60,) * 7,
    seconds: Sequence[float] = (1.0,) * 7,
    **text,
) -> list[Sample]:
    """Two runs of each question; the second takes a fifth longer."""
    return [
        Sample(
            method,
            "float32",
            (TaskPrompt(kind, (1, 2)),),
            number,
            repeat,
            (GeneratedText(TOKENS, rounds[number], **({"accepted_lengths": (0, 1)} | text)),),
            0.0,
            seconds[number] * (1 + repeat / 5),
            0,
        )
        for number, kind in enumerate(KINDS)
        for repeat in range(2)
    ]


FEW, SOME, MANY = (10,) * 7, (15,) * 7, (30,) * 7  # rounds for the same text
MIXED = (8, 22, 9, 24, 8, 23, 13)  # some questions better than SOME, some worse
UNEVEN = (0.5, 2.0, 0.5, 2.0, 0.5, 2.0, 0.5)


@pytest.mark.parametrize(
    "rounds, verdict",
    [(FEW, Verdict.HOLDS), (MANY, Verdict.FAILS), (MIXED, Verdict.UNDECIDED)],
)
def test_accepted_lengths_are_judged_by_their_spread_over_questions(rounds, verdict):
    finding = accepts_more(runs("new", rounds), runs("old", SOME))
    assert finding.verdict == verdict
    assert finding.spread.figure == pytest.approx(7 * 15 / sum(rounds))
    assert finding.spread.low <= finding.spread.figure <= finding.spread.high


@pytest.mark.parametrize(
    "seconds, verdict",
    [((0.5,) * 7, Verdict.HOLDS), ((1.5,) * 7, Verdict.FAILS), (UNEVEN, Verdict.UNDECIDED)],
)
def test_speeds_are_judged_by_quartiles_of_pairs(seconds, verdict):
    finding = faster(runs("new", SOME, seconds), runs("old", SOME))
    assert finding.verdict == verdict
    ratios = [1 / each for each in seconds for _ in range(2)]  # a pair shares its turn
    assert finding.spread == pytest.approx(tuple(np.percentile(ratios, (50, 25, 75))))


def test_equal_lengths_are_close_but_not_more():
    new, old = runs("new", SOME), runs("old", SOME)
    assert accepts_more(new, old).verdict == Verdict.UNDECIDED
    assert accepts_more(new, old, bar=0.95).verdict == Verdict.HOLDS


def test_a_claim_reads_its_kinds_of_questions_and_two_questions_decide_nothing():
    samples = {Condition(0.0, 1): [*runs("new", (10,) * 5 + (60,) * 2), *runs("old", SOME)]}
    on_edits, on_free = (
        accepts_more(*(runs_of(samples, name, kinds, 0.0) for name in ("new", "old")))
        for kinds in (EDITS, FREE)
    )
    assert (on_edits.spread.figure, on_edits.verdict) == (1.5, Verdict.HOLDS)
    assert on_free.verdict == Verdict.UNDECIDED


def test_the_bootstrap_is_seeded_and_resamples_questions():
    rounds = np.linspace(6, 20, 7) ** 1.1
    counts = np.column_stack([np.full(7, 60.0), rounds, np.full(7, 60.0), SOME])
    first, again, other = (bootstrap(share_ratio, counts, seed) for seed in (3, 3, 4))
    assert first == again
    assert first.figure == other.figure
    assert (first.low, first.high) != (other.low, other.high)


def test_depths_are_counted_from_the_histogram():
    # Rounds that committed n tokens; one of 3 has accepted depths 1 and 2, and was judged at 3.
    steep, flat = (
        runs(name, accepted_lengths=lengths)
        for name, lengths in {"steep": (0, 2, 2, 4, 2, 0), "flat": (0, 2, 2, 1, 2, 3)}.items()
    )
    finding = accepts_more_deeper(flat, steep, 3)
    assert finding.spread.figure == pytest.approx(((5 + 3) / (6 + 5)) / ((2 + 0) / (6 + 2)))
    assert finding.verdict == Verdict.HOLDS
    accepts_more_deeper(flat, steep, 4)
    with pytest.raises(SpecjaxError, match="longer than 5"):
        accepts_more_deeper(flat, steep, 5)


def test_draft_lengths_vary_by_their_deviation_over_their_mean():
    drafted = (True, False, True, True, True, False)  # lengths 1 and 3
    finding = drafts_vary(runs("oracle", from_draft=drafted), 0.4)
    assert finding.spread.figure == pytest.approx(0.5)
    assert finding.verdict == Verdict.HOLDS


def test_runs_are_read_from_a_finished_benchmark(tmp_path):
    results = open_results(tmp_path, {"target": "pocket", "command": "specjax bench"})
    plain, eagle = runs("plain"), runs("eagle", FEW, (0.5,) * 7)
    for turn in zip(plain, eagle, strict=True):
        results.add_trial(Condition(0.0, 1), turn)
        results.add_trial(Condition(0.0, 4), turn)  # which no claim reads
    results.write_rows(summarise([*plain, *eagle], {"plain": Program(), "eagle": Program()}))
    samples = read_samples(tmp_path)
    eagle, plain = (runs_of(samples, name, ALL, 0.0) for name in ("eagle", "plain"))
    assert (len(eagle), len(plain)) == (14, 14)
    assert faster(eagle, plain).spread.figure == pytest.approx(2.0)
    assert accepts_more(eagle, plain).spread.figure == pytest.approx(6.0)
    with pytest.raises(SpecjaxError, match="no runs of medusa on rename"):
        runs_of(samples, "medusa", ALL, 0.0)
    twice = {condition: [*runs, *runs] for condition, runs in samples.items()}
    with pytest.raises(SpecjaxError, match="eagle was measured twice on the same questions"):
        runs_of(twice, "eagle", ALL, 0.0)
