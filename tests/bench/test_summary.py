"""Summaries of made-up timed runs."""

import re
from dataclasses import replace

import pytest
from rich.console import Console

from specjax.bench.checks import near_ties, problems
from specjax.bench.measure import GeneratedText, Program, Sample, with_progress
from specjax.bench.report.terminal import show, table
from specjax.bench.summary import ALL, TextMatch, exactly, last_task_rows, summarise
from specjax.bench.ties import NearTies
from specjax.decoding.sampling import Sampling
from specjax.run.tasks import TaskPrompt
from tests.loading.tiny import tiny


def sample(method, number, repeat, text, seconds, kind="edits", dtype="float32"):
    """A run on one prompt of 5 tokens; `seconds` are those of prefill and decoding."""
    batch = (TaskPrompt(kind, (3,) * 5),)
    return Sample(method, dtype, batch, number, repeat, (text,), *seconds, 0)


def plain(num_tokens):
    return GeneratedText((7,) * num_tokens, num_tokens, (0, num_tokens))


PROGRAMS = {"plain": Program(3.0, False, 100), "fast": Program(4.0, True, 120)}
FAST = GeneratedText((7,) * 10, 4, (0, 1, 0, 3)), GeneratedText((7,) * 30, 6, (0, 0, 0, 0, 0, 6))
SAMPLES = [
    sample("plain", 0, 0, plain(10), (0.0, 1.0)),
    sample("plain", 0, 1, plain(10), (1.0, 1.0)),
    sample("plain", 1, 0, plain(30), (0.0, 3.0)),
    sample("plain", 1, 1, plain(30), (2.0, 3.0)),
    sample("fast", 0, 0, FAST[0], (0.1, 0.4)),  # x 2; a round 0.1 over 0.1
    sample("fast", 0, 1, FAST[0], (0.1, 0.4)),  # x 4; 0.1 over 0.1
    sample("fast", 1, 0, FAST[1], (0.4, 0.6)),  # x 3; 0.1 over 0.1
    sample("fast", 1, 1, FAST[1], (3.8, 1.2)),  # x 1; 0.2 over 0.1
]


def test_a_row_pools_prompts_and_forms_ratios_in_pairs():
    first, fast = summarise(SAMPLES, PROGRAMS, temperature=0.5)
    assert (first.method, first.ratio, first.compile_seconds) == ("plain", 1.0, 3.0)
    assert (fast.task, fast.temperature, fast.batch, fast.is_cached) == ("edits", 0.5, 1, True)
    assert (fast.num_new_tokens, fast.rounds, fast.passes, fast.mean_accepted_length) == (
        *(40, 10, 10),
        4.0,
    )
    assert fast.accepted_lengths == (0, 1, 0, 3, 0, 6)
    assert fast.rates == pytest.approx([9 / 10, 1.0, 6 / 9, 1.0])
    assert first.seconds == 1.5 + 4.0
    assert fast.seconds == pytest.approx(0.5 + 3.0)
    assert fast.tokens_per_second == pytest.approx(40 / 3.5)
    assert fast.ratio == 2.5
    assert fast.ratio_quartiles == (1.75, 3.25)
    assert fast.prefill_seconds == pytest.approx(0.1 + 2.1)
    assert fast.decode_seconds == pytest.approx(0.4 + 0.9)
    assert fast.round_overhead == pytest.approx(1.0)
    assert fast.mean_length == pytest.approx((4 * (5 + 5) + 6 * (5 + 15)) / 10)


def test_figures_are_formed_as_papers_do():
    """Over questions and runs: 10 and 30 tokens in 0.5 and 1 s, then in 0.5 and 5 s."""
    first, fast = (row.published for row in summarise(SAMPLES, PROGRAMS))
    assert fast.tokens_per_second == pytest.approx(((20 + 30) / 2 + (20 + 6) / 2) / 2)
    assert fast.tokens_per_second_std == pytest.approx(12 / 2**0.5)
    assert first.speed_up_std == 0
    assert fast.speed_up == pytest.approx((25 / 10 + 13 / 5.5) / 2)
    # The last drafts had 3 tokens more than the limit of 10 left room for.
    longer = FAST[0]._replace(accepted=9), FAST[1]._replace(accepted=24)
    cut = [
        each._replace(texts=(longer[each.number],)) if each.method == "fast" else each
        for each in SAMPLES
    ]
    _, fast = (row.published for row in summarise(cut, PROGRAMS))
    assert fast.tau == pytest.approx((9 / 4 + 24 / 6) / 2 + 1)
    assert fast.pooled_tau == pytest.approx((9 + 24) / 10 + 1)
    chat = [
        each._replace(batch=(each.batch[0]._replace(turn=each.number),)) for each in cut
    ]  # of two turns, so one question
    _, fast = (row.published for row in summarise(chat, PROGRAMS))
    assert fast.tokens_per_second == pytest.approx((40 / 1.5 + 40 / 5.5) / 2)
    assert fast.tau == fast.pooled_tau


def test_kinds_that_papers_report_as_one_have_a_row():
    kinds = ("writing", "coding", "qa")
    samples = [
        sample("plain", number, 0, plain(10), (0.0, 1.0), kind) for number, kind in enumerate(kinds)
    ]
    rows = summarise(samples, PROGRAMS)
    told = [(row.task, row.num_prompts, row.is_total) for row in rows]
    assert told == [*((kind, 1, False) for kind in kinds), ("mt-bench", 2, True), (ALL, 3, True)]
    assert [row.task for row in summarise(samples[:2], PROGRAMS)] == ["writing", "coding", ALL]


def test_a_batch_takes_as_many_passes_as_its_slowest_row():
    batch = tuple(TaskPrompt("edits", (3,) * length) for length in (5, 7))

    def of(method, texts):
        return Sample(method, "float32", batch, 0, 0, texts, 1.0, 6.0, 0)

    texts = plain(2), plain(6)
    fast = tuple(text._replace(rounds=rounds) for text, rounds in zip(texts, (2, 3), strict=True))
    samples = [of("plain", texts), of("fast", fast)]
    first, second = summarise(samples, PROGRAMS)
    assert (first.num_prompts, first.num_new_tokens, first.rounds, first.passes) == (2, 8, 8, 6)
    assert (second.rounds, second.passes, second.batch) == (5, 3, 2)
    assert second.mean_accepted_length == 8 / 5
    assert second.round_overhead == 2.0
    lie = fast[1]._replace(tokens=(7, 7, 7, 7, 7, 8))
    assert summarise([samples[0], of("fast", (fast[0], lie))], PROGRAMS)[1].num_different == 1


@pytest.mark.parametrize(
    "method, rounds, is_suspect",
    [("eagle", 64, True), ("draft-model", 64, True), ("eagle", 63, False), ("rest", 64, False)],
)
def test_trained_weights_that_never_help_are_reported(method, rounds, is_suspect, capsys):
    """As with a random head, or one of another target; a token is occasionally right."""
    useless = GeneratedText((7,) * (rounds + 1), rounds, (0, rounds - 1, 1))
    samples = [
        sample(name, 0, 0, text, (0.0, 1.0))
        for name, text in (("plain", plain(rounds + 1)), (method, useless))
    ]
    rows = summarise(samples, {"plain": Program(), method: Program()})
    assert [line.partition(": accepted")[0] for line in problems(rows)] == (
        [f"USELESS DRAFTER: {method}"] if is_suspect else []
    )
    renamed = [replace(row, method="mine", variant_of=row.method) for row in rows]
    assert [line.startswith("USELESS DRAFTER: mine") for line in problems(renamed)] == (
        [True] if is_suspect else []
    )
    show(rows, 1, 1e9)
    assert ("USELESS DRAFTER" in capsys.readouterr().out) == is_suspect


def test_near_ties_and_other_dtypes_are_distinguished_from_errors():
    def forgiving(pair):
        match = exactly(pair)
        return TextMatch.NEAR_TIE if match == TextMatch.DIFFERENT else match

    text, other = plain(2), GeneratedText((7, 8), 2, (0, 2))
    samples = [
        sample("plain", 0, 0, text, (0.0, 1.0)),
        sample("liar", 0, 0, other, (0.0, 1.0)),
        sample("peer", 0, 0, other._replace(accepted_lengths=()), (None, 1.0), dtype="float16"),
    ]
    programs = {"plain": Program(), "liar": Program(), "peer": Program()}
    same, tied, peer = summarise(samples, programs, forgiving)
    assert [row.identical for row in (same, tied, peer)] == [True, False, None]
    assert problems([same, tied, peer]) == []
    [line] = near_ties([same, replace(tied, dtype="bfloat16"), peer])
    assert line.startswith("near ties: liar left plain decoding's text on 1 of 1 edits prompts")
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table([same, tied, peer]))
    ends = [line.rstrip() for line in capture.get().splitlines()[2:]]
    assert ends[0].endswith("yes")
    assert ends[1].endswith("near ties: 1")
    assert ends[2].endswith("float16")
    assert (peer.prefill_seconds, peer.accepted_lengths, peer.rates) == (None, (), [])
    assert (peer.decode_seconds, peer.round_overhead) == (None, None)


@pytest.mark.parametrize(
    "verification, shown, is_lossy",
    [("rejection", "in distribution", False), ("typical", "LOSSY", True)],
)
def test_other_draws_are_not_compared_and_lossy_ones_are_told(
    capsys, verification, shown, is_lossy
):
    samples = [
        sample("plain", 0, 0, GeneratedText((3, 4, 5), 2), (0.0, 1.0)),
        sample("pld", 0, 0, GeneratedText((3, 4, 6), 2), (0.0, 1.0)),
    ]
    sampling = Sampling(0.8, verification=verification)
    programs = {"plain": Program(), "pld": Program()}
    rows = summarise(samples, programs, NearTies(tiny(), sampling, 0))
    assert [row.identical for row in rows] == [True, None]
    show(rows, 1, 1e9, sampling)
    printed = capsys.readouterr().out
    [line] = [line for line in printed.splitlines() if line.startswith("  pld")]
    assert line.rstrip().endswith(shown)
    assert ("LOSSY: " in printed) == is_lossy
    assert "DIFFERENT" not in printed


def test_a_kind_that_is_called_as_the_sum_hides_nothing():
    lie = FAST[0]._replace(tokens=(8,) * 10)
    samples = [sample("plain", 0, 0, plain(10), (0.0, 1.0), ALL)]
    samples += [sample("fast", 0, 0, lie, (0.0, 1.0), ALL)]
    [line] = problems(summarise(samples, PROGRAMS))
    assert line.startswith("DIFFERENT TOKENS: fast")
    samples.append(sample("plain", 1, 0, plain(10), (0.0, 1.0), "code"))
    rows = summarise(samples, PROGRAMS)
    assert [row.num_prompts for row in rows if row.method == "plain"] == [1, 1, 2]
    assert all(row.is_total for row in last_task_rows(rows))


def test_a_narrow_terminal_gets_a_table_that_fits(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    rows = summarise(SAMPLES, PROGRAMS)
    rows = [*rows, replace(rows[1], method="pld-plus-attention", peak_bytes=10**11)]
    for columns, is_whole in (("80", False), ("160", True)):
        monkeypatch.setenv("COLUMNS", columns)
        show(rows, 3, 1e9)
        printed = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
        assert max(map(len, printed.splitlines())) <= int(columns)
        assert ("bandwidth  prefill s" in printed) == is_whole
        assert "pld-plus-attention" in printed and "100000" in printed


def test_a_long_job_prints_a_line_now_and_then_without_a_terminal(monkeypatch, capsys):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    assert list(with_progress(range(7), "measuring")) == list(range(7))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "measuring: 1 of 7 (about 120 s left), 40 s",
        "measuring: 3 of 7 (about 80 s left), 80 s",
        "measuring: 5 of 7 (about 40 s left), 120 s",
    ]
