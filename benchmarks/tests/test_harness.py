"""The harness: command lines, tables, random models; and the smaller benchmarks on tiny shapes."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

from benchmarks import drafting, memory, rows, training
from benchmarks.draft_acceptance import acceptance, overlap
from benchmarks.drafting import DraftingOptions
from benchmarks.harness import CYCLE, cycling, option, parse, random_target, table
from benchmarks.memory import MemoryOptions, held
from benchmarks.rows import RowsOptions
from benchmarks.training import EAGLE, HASS, PASS, TrainingOptions, cost_rows
from specjax.bench.bandwidth import bytes_per_pass
from specjax.core.errors import SpecjaxError
from specjax.decoding.reference import reference_generate
from specjax.loading.targets import load
from specjax.models.cache import KVCache
from specjax.models.config import TransformerConfig
from specjax.models.target import causal_rows
from tests.decoding.tiny import prompt, target


@dataclass(frozen=True)
class SomeOptions:
    folder: str = option("a folder", kind=str)
    masks: tuple[int, ...] = option("several", (1, 2), int)
    dry_run: bool = option("a flag", False)
    rate: float = option("a number", 0.5)


def test_a_command_line_becomes_options():
    words = "here --masks 4 8 --dry-run --rate 2".split()
    assert parse(SomeOptions, "doc", words) == SomeOptions("here", (4, 8), True, 2.0)
    assert parse(SomeOptions, "doc", ["here"]) == SomeOptions("here")
    with pytest.raises(SystemExit):
        parse(SomeOptions, "doc", [])


def test_a_table_lines_up_and_is_no_markup():
    assert table(("name", "x"), [("a|b", 1), ("long\nname", 1.25)]).splitlines() == [
        "| name      |    x |",
        "| --------- | ---: |",
        "| a\\|b      |    1 |",
        "| long name | 1.25 |",
    ]


def test_a_cycling_target_counts():
    tiny = cycling(random_target("tiny", 64))
    own, _ = reference_generate(
        tiny.params, prompt(2), jax.random.key(0), target=tiny.model, max_new_tokens=20
    )
    last = np.array([prompt(2).tokens[row, int(prompt(2).length[row]) - 1] for row in range(2)])
    period = min(CYCLE, tiny.config.vocab_size)
    np.testing.assert_array_equal(own, (last[:, None] + 1 + np.arange(20)) % period)


def test_only_verified_tokens_count_as_rejected():
    # Drafts of 2: three rounds accept none, two accept one, five accept both.
    stats = SimpleNamespace(accepted_lengths=np.array([[0, 3, 2, 5]]), mean_accepted_length=2.2)
    length, rate = acceptance(stats, length=2)
    assert length == 2.2
    assert rate == pytest.approx((2 * 1 + 5 * 2) / (2 * 1 + 5 * 2 + 3 + 2))


def test_overlap_is_1_minus_half_the_sum_of_differences():
    models = [target(), target(seed=1)]
    text = jnp.asarray(np.random.default_rng(0).integers(0, 40, (1, 9)))
    found = []
    for model, params in models:
        cache = KVCache.create(model.config, 1, 9)
        rows = causal_rows(text, jnp.zeros(1, jnp.int32))
        output, _ = jax.jit(model.run)(params, rows, cache)
        found.append(softmax(np.asarray(output.logits[0]) / 0.7, axis=-1))
    expected = 1 - np.abs(found[0] - found[1]).sum(axis=-1) / 2
    np.testing.assert_allclose(overlap(text, models, 0.7), expected, atol=1e-5)


def test_drafting_is_timed_alone_and_in_rounds(capsys, monkeypatch):
    monkeypatch.setattr(drafting, "NUM_TOKENS", 6)
    monkeypatch.setattr(drafting, "DRAFTED", (0, 5, 6))
    monkeypatch.setattr(drafting, "MORE_ROUNDS", 2)
    drafting.run(DraftingOptions(size="tiny", context=160, rounds=1, runs=1))
    printed = capsys.readouterr().out
    assert "plain step" in printed
    for count in (0, 5, 6):
        assert f"round of pld-plus, {count} drafted" in printed
    assert "drafting alone, pld-plus-attention" in printed


def test_every_training_step_is_timed(capsys, monkeypatch):
    monkeypatch.setattr(training, "MAX_STEPS", 2)
    training.run(TrainingOptions(size="tiny", batch_size=2, length=16, repeats=1))
    printed = capsys.readouterr().out
    for name in (PASS, EAGLE, *(HASS.format(steps) for steps in (1, 2))):
        assert name in printed


def test_rows_are_timed_against_one_row_and_the_floor(capsys, monkeypatch):
    monkeypatch.setattr(rows, "read_bandwidth", lambda: 1e9)
    rows.run(RowsOptions("pocket", "bfloat16", (4,), (128,), passes=1, repeats=1))
    printed = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed[2:-1]]
    assert [row[:2] for row in cells] == [["128", "1"], ["128", "4"]]
    assert cells[0][3] == "1.00"
    floor_ms = 1e3 * bytes_per_pass(load("pocket", "bfloat16"), 128.0) / 1e9
    for row in cells:
        assert float(row[4]) == pytest.approx(float(row[2]) / floor_ms, rel=0.05, abs=0.01)
    assert "bfloat16" in printed[-1] and "1 GB/s" in printed[-1]


def test_training_costs_are_medians_of_pairs():
    seconds = {PASS: [1.0, 1.0, 1.0], EAGLE: [2.0, 4.0, 2.0], "other": [6.0, 4.0, 6.0]}
    assert cost_rows(seconds, 8) == [
        [PASS, "8", "0.50", "1.00"],
        [EAGLE, "4", "1.00", "2.00"],
        ["other", "1", "3.00", "6.00"],
    ]


CONFIG = TransformerConfig(320, 32, 48, 2, 4, 2, 64, max_position_embeddings=4096)


@pytest.mark.parametrize("method", ["plain", "pld"])
def test_a_request_holds_one_cache(method):
    found = held(method, CONFIG, prompt_length=64, max_new_tokens=1700)
    assert found.cache_copies == 0
    scores = 2 * found.scores  # and as weights: more than the cache of so small a model
    assert found.temporary - scores < 1.1 * found.cache


@pytest.mark.parametrize(
    "run, options, message",
    [
        (drafting.run, DraftingOptions(size="8t"), "size '8t' is unknown; choose one of 160m, 7b"),
        (drafting.run, DraftingOptions(size="tiny", context=100), "context at least 142"),
        (drafting.run, DraftingOptions(size="tiny", runs=0), "runs must be at least 1"),
        (training.run, TrainingOptions(size="8t"), "size '8t' is unknown"),
        (training.run, TrainingOptions(repeats=0), "repeats 0 must be at least 1"),
        (rows.run, RowsOptions("pocket", rows=(0,)), r"rows \[0, 1\] must be at least 1"),
        (rows.run, RowsOptions("pocket", rows=(640,)), "less than slots"),
        (rows.run, RowsOptions("pocket", repeats=0), "repeats 0 must be at least 1"),
        (memory.run, MemoryOptions(methods="foo"), "method 'foo' is unknown"),
        (memory.run, replace(MemoryOptions(), width=9), "width 9 must be at least"),
    ],
)
def test_options_that_cannot_be_are_refused(run, options, message):
    with pytest.raises(SpecjaxError, match=message):
        run(options)
