"""The claims: made-up measurements are judged as they deserve, and every claim can be judged."""

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from specjax.bench.claims import run as claims_run
from specjax.bench.claims.checks import (
    AcceptsMore,
    AcceptsMoreDeeper,
    DraftsFaster,
    DraftsInLess,
    Faster,
    Foretells,
    GainsMore,
    GainsMoreOn,
    SameTokens,
    Varies,
    share_ratio,
)
from specjax.bench.claims.findings import (
    CLOSE,
    EDITS,
    FREE,
    Claim,
    Measured,
    Verdict,
    bootstrap,
    find,
)
from specjax.bench.claims.options import ClaimsOptions
from specjax.bench.claims.report import HEADER, as_values, markdown, show, write
from specjax.bench.claims.run import (
    SAMPLED,
    TRACED,
    contestants_of,
    foretold_by_prompt,
    names_at,
    requests_of,
)
from specjax.bench.claims.table import CLAIMS
from specjax.bench.measure import PLAIN, Program, Request, Sample, Text
from specjax.bench.rounds import Round, Trace
from specjax.bench.summary import summarise
from specjax.bench.tasks import Task
from specjax.cli import main
from specjax.core.files import writable_folder
from specjax.hub import load
from specjax.methods import METHODS
from specjax.models.config import TransformerConfig

CONFIG = TransformerConfig(320, 32, 48, 2, 4, 2, 8)
KINDS = (*EDITS, *FREE, *FREE)
TOKENS = tuple(range(60))
ABOUT = {
    "target": "pocket", "dtype": "float32", "device": "cpu", "prompts": 7, "runs": 2,
    "max_new_tokens": 60, "minutes": 1.5, "command": "specjax bench claims",
}  # fmt: skip


def runs(
    method: str,
    rounds: Sequence[int] = (60,) * 7,
    seconds: Sequence[float] = (1.0,) * 7,
    tokens: tuple[int, ...] = TOKENS,
) -> list[Sample]:
    """Two runs of each prompt; the second takes a fifth longer."""
    return [
        Sample(
            method,
            "float32",
            (Request(kind, (1, 2)),),
            number,
            repeat,
            (Text(tokens, rounds[number], (0, rounds[number], 0), (True, False) * 30),),
            0.0,
            seconds[number] * (1 + repeat / 5),
            0,
        )
        for number, kind in enumerate(KINDS)
        for repeat in range(2)
    ]


def traced(*milliseconds: float) -> Trace:
    return Trace("some", [Round(each / 1e3, 8e-3, 1e-3, 2) for each in milliseconds], 0.01)


def measured(*groups: list[Sample], temperature: float = 0.0, **others) -> Measured:
    samples = {group[0].method: group for group in groups}
    rows = []
    if PLAIN in samples:
        everything = [sample for group in groups for sample in group]
        rows = summarise(everything, dict.fromkeys(samples, Program()), temperature=temperature)
    given = {"traces": {}, "foretold": np.zeros((7, 5)), **others}
    return Measured({temperature: samples}, {temperature: rows}, **given)


FEW, SOME, MANY = (10,) * 7, (15,) * 7, (30,) * 7  # rounds for the same text
MIXED = (8, 22, 9, 24, 8, 23, 13)  # some prompts better than SOME, some worse
UNEVEN = (0.5, 2.0, 0.5, 2.0, 0.5, 2.0, 0.5)


# ---- Verdicts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rounds, verdict",
    [(FEW, Verdict.HOLDS), (MANY, Verdict.FAILS), (MIXED, Verdict.UNDECIDED)],
)
def test_accepted_lengths_are_judged_by_their_spread_over_prompts(rounds, verdict):
    finding = AcceptsMore("new", "old")(measured(runs("new", rounds), runs("old", SOME)))
    assert finding.verdict == verdict
    assert finding.spread.figure == pytest.approx(7 * 15 / sum(rounds))
    assert finding.spread.low <= finding.spread.figure <= finding.spread.high


@pytest.mark.parametrize(
    "seconds, verdict",
    [((0.5,) * 7, Verdict.HOLDS), ((1.5,) * 7, Verdict.FAILS), (UNEVEN, Verdict.UNDECIDED)],
)
def test_speeds_are_judged_by_quartiles_of_pairs(seconds, verdict):
    finding = Faster("new", "old")(measured(runs("new", SOME, seconds), runs("old", SOME)))
    assert finding.verdict == verdict
    ratios = [1 / each for each in seconds for _ in range(2)]  # a pair shares its turn
    assert finding.spread == pytest.approx(tuple(np.percentile(ratios, (50, 25, 75))))


def test_what_is_equal_is_close_but_not_more():
    found = measured(runs("new", SOME), runs("old", SOME))
    assert AcceptsMore("new", "old")(found).verdict == Verdict.UNDECIDED
    assert AcceptsMore("new", "old", bar=CLOSE)(found).verdict == Verdict.HOLDS
    slightly_less = measured(runs("new", (17,) * 7), runs("old", SOME))
    assert AcceptsMore("new", "old", bar=CLOSE)(slightly_less).verdict == Verdict.FAILS


def test_two_prompts_decide_nothing():
    found = measured(runs("new", FEW), runs("old", SOME))
    finding = AcceptsMore("new", "old", FREE)(found)
    assert finding.spread.figure == 1.5
    assert finding.verdict == Verdict.UNDECIDED


def test_a_claim_about_some_tasks_reads_no_others():
    rounds = (10,) * 5 + (60,) * 2
    found = measured(runs("new", rounds), runs("old", SOME))
    assert AcceptsMore("new", "old", EDITS)(found).spread.figure == 1.5


def test_the_bootstrap_is_seeded_and_resamples_prompts():
    rounds = np.linspace(6, 20, 7) ** 1.1
    counts = np.column_stack([np.full(7, 60.0), rounds, np.full(7, 60.0), SOME])
    first, again, other = (bootstrap(share_ratio, [counts], seed) for seed in (3, 3, 4))
    assert first == again
    assert first.figure == other.figure
    assert (first.low, first.high) != (other.low, other.high)
    same = np.repeat(counts[:1], 7, axis=0)
    assert bootstrap(share_ratio, [same]) == pytest.approx((15 / rounds[0],) * 3)


# ---- The other checks --------------------------------------------------------------------------


def test_gains_on_edits_are_compared_with_those_on_free_text():
    seconds = (0.25,) * 5 + (0.8,) * 2
    found = measured(runs(PLAIN), runs("copies", FEW, seconds))
    finding = GainsMoreOn("copies", EDITS, FREE)(found)
    assert finding.spread.figure == pytest.approx(4 / 1.25)
    assert finding.verdict == Verdict.UNDECIDED  # free text has two prompts
    swapped = GainsMoreOn("copies", FREE + EDITS[:2], EDITS[2:])(found)
    assert swapped.spread.figure < 1


def test_a_change_gains_more_in_one_method_than_in_another():
    groups = runs("a10", MANY), runs("a70", FEW), runs("b10", MANY), runs("b70", (24,) * 7)
    finding = GainsMore(("a70", "a10"), ("b70", "b10"), EDITS)(measured(*groups))
    assert finding.spread.figure == pytest.approx(3 / 1.25)
    assert finding.verdict == Verdict.HOLDS


def test_depths_are_counted_from_the_histogram():
    def of(method: str, histogram: tuple[int, ...]) -> list[Sample]:
        text = Text(TOKENS, 10, histogram)
        return [each._replace(texts=(text,)) for each in runs(method)]

    # Rounds that committed n tokens; one of 3 has accepted depths 1 and 2, and was judged at 3.
    steep, flat = of("steep", (0, 2, 2, 4, 2, 0)), of("flat", (0, 2, 2, 1, 2, 3))
    finding = AcceptsMoreDeeper("flat", "steep", 3)(measured(steep, flat))
    assert finding.spread.figure == pytest.approx(((5 + 3) / (6 + 5)) / ((2 + 0) / (6 + 2)))
    assert finding.verdict == Verdict.HOLDS


def test_the_oracle_varies_by_deviation_over_mean():
    def of(*pattern: int) -> list[Sample]:
        drafted = [is_drafted for length in pattern for is_drafted in [*[True] * length, False]]
        text = Text(tuple(range(len(drafted))), len(pattern), from_draft=tuple(drafted))
        return [each._replace(texts=(text,)) for each in runs("oracle")]

    wide, even = Varies("oracle", 0.88)(measured(of(0, 0, 9))), Varies("oracle", 0.88)
    assert wide.spread.figure == pytest.approx(np.std([0, 0, 9]) / 3)
    assert wide.verdict == Verdict.HOLDS
    assert even(measured(of(2, 3, 2))).verdict == Verdict.FAILS


def test_the_classifier_is_compared_with_a_static_length_by_f1():
    # accepted; foretold and right of the classifier; the same of the static length
    better = np.tile([8.0, 8, 7, 8, 5], (7, 1))
    finding = Foretells()(measured(runs("any"), foretold=better))
    assert finding.spread.figure == pytest.approx(14 / 16 - 10 / 16)
    assert finding.verdict == Verdict.HOLDS
    worse = better[:, [0, 3, 4, 1, 2]]
    assert Foretells()(measured(runs("any"), foretold=worse)).verdict == Verdict.FAILS


def test_the_time_to_draft_is_judged_by_opposite_quartiles():
    traces = {"one pass": traced(1, 1.1, 1.2), "five": traced(4, 5, 6), "slow": traced(1, 9, 20)}
    found = measured(runs("any"), traces=traces)
    assert DraftsFaster("one pass", "five", 0.5)(found).verdict == Verdict.HOLDS
    assert DraftsFaster("five", "one pass")(found).verdict == Verdict.FAILS
    assert DraftsFaster("slow", "five")(found).verdict == Verdict.UNDECIDED
    assert DraftsInLess("one pass", 0.2)(found).verdict == Verdict.HOLDS
    assert DraftsInLess("five", 0.2)(found).verdict == Verdict.FAILS


def test_one_other_text_decides_against_equality():
    plain, same = runs(PLAIN), runs("same")
    assert SameTokens(0.0)(measured(plain, same)).verdict == Verdict.HOLDS
    other = runs("other")
    other[4] = other[4]._replace(texts=(Text((*TOKENS[:-1], 7), 60, (0, 60, 0)),))
    finding = SameTokens(0.0)(measured(plain, same, other))
    assert finding.verdict == Verdict.FAILS
    assert finding.ours == "1 of 14 texts differ, 2 methods and settings"


# ---- The table of claims -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def lines():
    """The claims, judged by made-up runs of just what `claims_run` measures."""
    stages = [
        measured(*(runs(name, SOME) for name in names_at(temperature, CONFIG)),
                 temperature=temperature)
        for temperature in (0.0, SAMPLED)
    ]  # fmt: skip
    cold, warm = stages
    whole = replace(
        cold,
        samples={**cold.samples, **warm.samples},
        rows={**cold.rows, **warm.rows},
        traces=dict.fromkeys(TRACED, traced(1, 1, 1)),
    )
    return find(CLAIMS, whole)


def test_every_claim_finds_its_measurements_or_says_what_is_missing(lines):
    for line in lines:
        claim = line.claim
        assert claim.text and claim.published and line.ours
        assert (line.verdict == Verdict.NOT_CHECKED) == (claim.check is None) == bool(claim.missing)
    assert {line.claim.paper for line in lines} == {
        *("PLD+", "DISCO", "ParallelSpec", "HASS", "specjax"),
    }


@pytest.fixture
def few_tasks(monkeypatch):
    """Short tasks in the place of pocket's own, which take seconds to make."""

    def read(source: str, limit: int, seed: int) -> list[Task]:
        return [Task(kind, (f"task {seed}",)) for kind in (*EDITS, *FREE) for _ in range(limit)]

    monkeypatch.setattr(claims_run, "read_tasks", read)


def test_every_contestant_is_made_and_bears_its_name(few_tasks):
    target, options = load("pocket"), ClaimsOptions(limit=1)
    requests = requests_of(target, options)
    assert [request.kind for request in requests] == [*EDITS, *FREE * 2]
    for temperature in (0.0, SAMPLED):
        names = names_at(temperature, target.config)
        assert names[0] == PLAIN
        assert len(set(names)) == len(names)
        wanted = [name for name in names if name not in METHODS]  # others test all methods
        made = contestants_of(target, requests, temperature, options, wanted)
        assert [each.name for each in made.values()] == list(made) == wanted
        assert {each.sampling.temperature for each in made.values()} == {temperature}
    assert set(TRACED) <= set(names_at(0.0, target.config))


def test_foretold_tokens_are_counted_by_prompt():
    target = load("pocket")
    ids = tuple(target.require_tokenizer()("def total(values):\n    return sum(")["input_ids"])
    samples = [
        Sample(PLAIN, "float32", (Request("edit", ids),), number, 0, (text,), 0.0, 1.0, 0)
        for number, text in enumerate([Text((5, 6, 7), 3), Text((8, 9), 2)])
    ]
    counts = foretold_by_prompt(target, samples)
    assert counts.shape == (2, 5)
    accepted, by_classifier, right, by_length, right_by_length = counts.T
    assert (accepted <= (3, 2)).all()
    assert (right <= np.minimum(by_classifier, accepted)).all()
    assert (right_by_length <= np.minimum(by_length, accepted)).all()


# ---- The report and the command line -----------------------------------------------------------


def test_markdown_has_a_table_per_paper_whose_rows_are_equally_long(lines):
    odd = Claim("PLD+", "with a | in it", "1|2", missing="nothing")
    text = markdown([*lines, *find([odd], measured(runs("any")))], ABOUT, ["DIFFERENT TOKENS: x"])
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == len(lines) + 1 + 2 * 5
    assert {line.replace("\\|", "").count("|") for line in rows} == {len(HEADER) + 1}
    assert "**WRONG WITH THESE RESULTS**" in text
    assert "DIFFERENT TOKENS: x" in text
    assert text.count("## ") == 5


def test_the_folder_holds_the_findings_and_the_rule(lines, tmp_path, capsys):
    folder = writable_folder(tmp_path / "new" / "claims")
    write(folder, lines, ABOUT, [], [{"method": "pld"}])
    values = json.loads((folder / "claims.json").read_text(encoding="utf-8"))
    assert values["claims"] == [as_values(line) for line in lines]
    assert "quartiles" in values["rule"] and values["rows"] == [{"method": "pld"}]
    assert (folder / "claims.md").read_text(encoding="utf-8").startswith("# What the papers claim")
    show(lines, ABOUT, ["DIFFERENT TOKENS: x"])
    shown = capsys.readouterr().out
    assert "DIFFERENT TOKENS: x" in shown
    assert str(sum(line.verdict == Verdict.NOT_CHECKED for line in lines)) in shown


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("bench --limit 2 claims", "claims has options of its own; write them behind it"),
        ("bench claims --runs 0", "--runs 0 must be at least 1"),
        ("bench claims --seed -1", "--seed -1 is outside"),
        ("bench claims --max-new-tokens 5000", "prompt tokens + 5000 new ones exceed"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(arguments, message, capsys, few_tasks):
    assert main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
