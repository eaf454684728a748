"""The harness: tables, random models; and the smaller benchmarks on tiny shapes."""

import jax
import numpy as np
import pytest

from benchmarks import rows
from benchmarks.harness import CYCLE, cycling, random_target, table
from benchmarks.rows import RowsOptions
from specjax.bench.bandwidth import bytes_per_pass
from specjax.core.errors import SpecjaxError
from specjax.decoding.reference import reference_generate
from specjax.loading.targets import load
from tests.decoding.tiny import prompt


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


@pytest.mark.slow
def test_rows_are_timed_against_one_row_and_the_floor(capsys, monkeypatch):
    monkeypatch.setattr(rows, "read_bandwidth", lambda: 1e9)
    rows.run(RowsOptions("pocket", "bfloat16", (4,), (128,), passes=1, repeats=1))
    printed = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed[2:-1]]
    assert [row[:2] for row in cells] == [["128", "1"], ["128", "4"]]
    assert cells[0][3] == "1.00"
    floor_ms = 1e3 * bytes_per_pass(load("pocket", "bfloat16"), 128.0) / 1e9
    rounding = 0.05 / floor_ms + 0.006  # milliseconds have one decimal, ratios two
    for row in cells:
        assert float(row[4]) == pytest.approx(float(row[2]) / floor_ms, abs=rounding)
    assert "bfloat16" in printed[-1] and "1 GB/s" in printed[-1]


@pytest.mark.parametrize(
    "options, message",
    [
        (RowsOptions("pocket", rows=(0,)), "rows"),
        (RowsOptions("pocket", rows=(640,)), "slots"),
        (RowsOptions("pocket", repeats=0), "repeats"),
    ],
)
def test_bad_options_are_rejected(options, message):
    with pytest.raises(SpecjaxError, match=message):
        rows.run(options)
