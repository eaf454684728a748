"""The claims: made-up evidence is judged as it deserves, and missing evidence names a command."""

from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.claims.__main__ import ClaimsOptions, run
from benchmarks.claims.checks import (
    AcceptsMore,
    AcceptsMoreDeeper,
    DraftsFaster,
    DraftsInLess,
    Faster,
    GainsMoreOn,
    SameTokens,
    Spot,
    Sweep,
    share_ratio,
)
from benchmarks.claims.curves import Curve, keep_curve
from benchmarks.claims.evidence import (
    BEST_STATIC,
    CLOSE,
    EDITS,
    FREE,
    STATIC,
    Evidence,
    NotMeasured,
    Verdict,
    bootstrap,
    read_evidence,
)
from benchmarks.claims.papers import PAPERS, Claim
from benchmarks.claims.report import HEADER, examine
from benchmarks.claims.traces import TRACES
from specjax.bench.measure import PLAIN, GeneratedText, Program, Sample
from specjax.bench.results import Condition, Point, open_results
from specjax.bench.summary import summarise
from specjax.core.errors import SpecjaxError
from specjax.run.tasks import TaskPrompt

KINDS = (*EDITS, *FREE, *FREE)
TOKENS = tuple(range(60))


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
            (TaskPrompt(kind, (1, 2)),),
            number,
            repeat,
            (GeneratedText(tokens, rounds[number], (0, rounds[number], 0), (True, False) * 30),),
            0.0,
            seconds[number] * (1 + repeat / 5),
            0,
        )
        for number, kind in enumerate(KINDS)
        for repeat in range(2)
    ]


def traced(*milliseconds: float) -> dict:
    """The figures of rounds that take 9 ms beside the draft."""
    seconds = np.array(milliseconds) / 1e3
    shares = seconds / (seconds + 9e-3)
    return {
        "num_rounds": len(seconds),
        "draft_seconds": float(np.median(seconds)),
        "draft_quartiles": np.percentile(seconds, (25, 75)).tolist(),
        "draft_share_quartiles": np.percentile(shares, (25, 50, 75)).tolist(),
    }


def measured(*groups: list[Sample], temperature: float = 0.0, **others) -> Evidence:
    samples = {group[0].method: group for group in groups}
    rows = []
    if PLAIN in samples:
        everything = [sample for group in groups for sample in group]
        rows = summarise(everything, dict.fromkeys(samples, Program()), temperature=temperature)
    return Evidence({temperature: samples}, {temperature: rows}, **others)


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


def test_a_draft_length_is_compared_with_the_fastest_fixed_one():
    slow = [runs(name) for name in ("disco", *STATIC) if name != "static-2"]
    found = measured(runs(PLAIN), *slow, runs("static-2", seconds=(0.5,) * 7))
    finding = Faster("disco", BEST_STATIC)(found)
    assert (finding.verdict, finding.spread.figure) == (Verdict.FAILS, pytest.approx(0.5))
    assert finding.ours.endswith("over static-2")


def test_equal_lengths_are_close_but_not_more():
    found = measured(runs("new", SOME), runs("old", SOME))
    assert AcceptsMore("new", "old")(found).verdict == Verdict.UNDECIDED
    assert AcceptsMore("new", "old", bar=CLOSE)(found).verdict == Verdict.HOLDS


def test_a_claim_reads_its_kinds_of_task_and_two_prompts_decide_nothing():
    found = measured(runs("new", (10,) * 5 + (60,) * 2), runs("old", SOME))
    assert AcceptsMore("new", "old", EDITS)(found).spread.figure == 1.5
    assert AcceptsMore("new", "old", EDITS)(found).verdict == Verdict.HOLDS
    assert AcceptsMore("new", "old", FREE)(found).verdict == Verdict.UNDECIDED


def test_the_bootstrap_is_seeded_and_resamples_prompts():
    rounds = np.linspace(6, 20, 7) ** 1.1
    counts = np.column_stack([np.full(7, 60.0), rounds, np.full(7, 60.0), SOME])
    first, again, other = (bootstrap(share_ratio, [counts], seed) for seed in (3, 3, 4))
    assert first == again
    assert first.figure == other.figure
    assert (first.low, first.high) != (other.low, other.high)


# ---- The other checks --------------------------------------------------------------------------


def test_gains_on_edits_are_compared_with_those_on_free_text():
    seconds = (0.25,) * 5 + (0.8,) * 2
    found = measured(runs(PLAIN), runs("copies", FEW, seconds))
    finding = GainsMoreOn("copies", EDITS, FREE)(found)
    assert finding.spread.figure == pytest.approx(4 / 1.25)
    assert finding.verdict == Verdict.UNDECIDED  # free text has two prompts


def test_depths_are_counted_from_the_histogram():
    def of(method: str, histogram: tuple[int, ...]) -> list[Sample]:
        text = GeneratedText(TOKENS, 10, histogram)
        return [each._replace(texts=(text,)) for each in runs(method)]

    # Rounds that committed n tokens; one of 3 has accepted depths 1 and 2, and was judged at 3.
    steep, flat = of("steep", (0, 2, 2, 4, 2, 0)), of("flat", (0, 2, 2, 1, 2, 3))
    finding = AcceptsMoreDeeper("flat", "steep", 3)(measured(steep, flat))
    assert finding.spread.figure == pytest.approx(((5 + 3) / (6 + 5)) / ((2 + 0) / (6 + 2)))
    assert finding.verdict == Verdict.HOLDS
    AcceptsMoreDeeper("flat", "steep", 4)(measured(steep, flat))
    with pytest.raises(NotMeasured, match="depth=5"):  # no draft is that long
        AcceptsMoreDeeper("flat", "steep", 5)(measured(steep, flat))


def curves_of(**series: dict) -> list[Curve]:
    points = {
        name: [Point(value, length, 100 * length) for value, length in values.items()]
        for name, values in series.items()
    }
    return [Curve("a sweep", "K", points)]


def test_curves_decide_beyond_a_margin():
    curves = curves_of(new={10: 2.0, 70: 3.0, 100: 3.03}, old={10: 2.0, 70: 1.0})
    found = measured(curves=curves)

    def sweep(first, second, **others):
        spots = Spot("K", "new", first), Spot("K", "new", second)
        return Sweep(*spots, **others)(found)

    assert sweep(70, 10).verdict == Verdict.HOLDS
    assert sweep(70, 10).spread.figure == pytest.approx(1.5)
    assert sweep(10, 70).verdict == Verdict.FAILS
    assert sweep(70, 100).verdict == Verdict.UNDECIDED
    assert sweep(70, 100, bar=CLOSE).verdict == Verdict.HOLDS
    assert sweep("best", 10, is_speed=True).spread.figure == pytest.approx(1.515)
    old = Spot("K", "old", 70), Spot("K", "old", 10)
    assert sweep(70, 10, than=old).spread.figure == pytest.approx(3.0)
    with pytest.raises(NotMeasured, match="ablations --out FOLDER"):
        sweep(70, 50)


def test_the_time_to_draft_is_judged_by_opposite_quartiles():
    traces = {"one pass": traced(1, 1.1, 1.2), "five": traced(4, 5, 6), "slow": traced(1, 9, 20)}
    found = measured(traces=traces)
    assert DraftsFaster("one pass", "five", 0.5)(found).verdict == Verdict.HOLDS
    assert DraftsFaster("five", "one pass")(found).verdict == Verdict.FAILS
    assert DraftsFaster("slow", "five")(found).verdict == Verdict.UNDECIDED
    assert DraftsInLess("one pass", 0.2)(found).verdict == Verdict.HOLDS
    assert DraftsInLess("five", 0.2)(found).verdict == Verdict.FAILS
    with pytest.raises(NotMeasured, match="traces --out"):
        DraftsInLess("other", 0.2)(found)


def test_one_other_text_decides_against_equality():
    plain, same = runs(PLAIN), runs("same")
    assert SameTokens(0.0)(measured(plain, same)).verdict == Verdict.HOLDS
    other = runs("other")
    other[4] = other[4]._replace(texts=(GeneratedText((*TOKENS[:-1], 7), 60, (0, 60, 0)),))
    finding = SameTokens(0.0)(measured(plain, same, other))
    assert finding.verdict == Verdict.FAILS
    assert finding.ours == "1 of 14 texts differ, 2 methods"


# ---- A folder, and the report ------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A finished benchmark of two methods, with a curve."""
    results = open_results(tmp_path, {"target": "pocket", "command": "specjax bench"})
    plain, eagle = runs(PLAIN), runs("eagle", FEW, (0.5,) * 7)
    for turn in zip(plain, eagle, strict=True):
        results.add_trial(Condition(0.0, 1), turn)
        results.add_trial(Condition(0.0, 4), turn)  # which no claim reads
    results.write_rows(summarise([*plain, *eagle], {PLAIN: Program(), "eagle": Program()}))
    results.folder.write_json(
        TRACES, {"temperature": 0.0, "methods": [{"method": "eagle", **traced(1, 2, 3)}]}
    )
    keep_curve(tmp_path, curves_of(new={10: 2.0})[0])
    return tmp_path


def test_evidence_is_read_from_a_finished_benchmark(folder):
    found = read_evidence(folder)
    assert set(found.samples) == {0.0}
    assert {name: len(own) for name, own in found.samples[0.0].items()} == {PLAIN: 14, "eagle": 14}
    assert Faster("eagle", PLAIN)(found).spread.figure == pytest.approx(2.0)
    assert AcceptsMore("eagle", PLAIN)(found).spread.figure == pytest.approx(6.0)
    assert SameTokens(0.0)(found).verdict == Verdict.HOLDS
    assert found.trace("eagle")["num_rounds"] == 3
    assert found.point("K", "new", 10).accepted_length == 2.0


def test_missing_evidence_names_the_command_that_measures_it(folder):
    found = read_evidence(folder)
    commands = {
        Faster("eagle", "medusa"): "specjax bench --methods all --temperature 0 --out FOLDER",
        AcceptsMore("eagle", "eagle", temperature=1.0): "--temperature 1 --out FOLDER",
        SameTokens(1.0): "--temperature 1 --out FOLDER",
        DraftsInLess("medusa", 0.1): "claims.traces --out FOLDER",
        Faster("disco", "eagle"): "--set disco.rule=disco --temperature 0 --out FOLDER",
        Faster("eagle", BEST_STATIC): "static-1=draft-model --set static-1.length=1",
        AcceptsMore("blind", "eagle", temperature=1.0): "noise_share=0 --temperature 1 --out",
    }
    for check, command in commands.items():
        line = examine(Claim("text", "1x", check), found)
        assert (line.verdict, line.finding) == (Verdict.NOT_MEASURED, None)
        assert command in line.ours


def test_the_report_has_a_table_per_paper_whose_rows_are_equally_long(folder, tmp_path, capsys):
    out = tmp_path / "claims.md"
    run(ClaimsOptions(folder, str(out)))
    text = out.read_text()
    assert text in capsys.readouterr().out
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == sum(map(len, PAPERS.values())) + 2 * len(PAPERS)
    cells = [line.replace("\\|", "").split("|")[1:-1] for line in rows]
    assert all(len(row) == len(HEADER) and all(map(str.strip, row)) for row in cells)
    assert text.count("\n## ") == len(PAPERS)
    assert "quartiles" in text and "target pocket" in text


def test_a_folder_without_results_is_rejected(tmp_path):
    with pytest.raises(SpecjaxError, match="holds no benchmark"):
        run(ClaimsOptions(tmp_path / "none"))
