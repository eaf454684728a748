"""What heads are worth: the tables say what was measured, and a useless drafter is called so."""

from dataclasses import replace

import pytest

from specjax.bench.heads import HeadSource, Options, _run, heads_in, speed_table
from specjax.bench.measure import PLAIN, Program, Request, Sample, Text
from specjax.bench.report import complaints
from specjax.bench.summary import ALL, Measurement, summarise
from specjax.core.errors import SpecjaxError
from specjax.hub import pocket_folder


def rows(method: str, accepted: int) -> list[Measurement]:
    """Plain decoding, and a method that accepts `accepted` tokens per round; the same text."""
    batch, tokens = (Request("edit", (1, 2)),), tuple(range(12))
    texts = {PLAIN: Text(tokens, 12), method: Text(tokens, 12 // accepted)}
    samples = [
        Sample(name, "float32", batch, 0, repeat, (text,), 0.0, 1.0 / len(name), 0)
        for repeat in range(2)
        for name, text in texts.items()
    ]
    of_edits = summarise(samples, dict.fromkeys(texts, Program()))
    return [*of_edits, *(replace(row, task=ALL) for row in of_edits)]


def cells(table) -> list[list[str]]:
    return [list(row) for row in zip(*(column.cells for column in table.columns), strict=True)]


def test_the_table_has_a_row_per_head_and_a_column_per_task():
    table = speed_table(rows("eagle2", 4), 0.0)
    assert [column.header for column in table.columns] == [
        "T=0: accepted length (x plain)",
        "edit",
        "all",
        "quartiles",
        "same",
    ]
    assert cells(table) == [
        [PLAIN, "1.00 (1.00x)", "1.00 (1.00x)", "1.00-1.00", "yes"],
        ["eagle2", "4.00 (1.20x)", "4.00 (1.20x)", "1.20-1.20", "yes"],
    ]


def test_a_head_of_which_nothing_is_accepted_is_called_useless():
    assert complaints(rows("eagle2", 4)) == []
    [line] = complaints(rows("eagle2", 1))
    assert line.startswith("OF NO USE: eagle2: accepted length 1.0")
    assert "in 12 rounds; check that the drafter was trained for this very target" in line
    assert complaints(rows("pld", 1)) == []  # a text may just not repeat itself
    several = rows("eagle2", 1)
    one_task_of_two = [row if row.task == "edit" else replace(row, mean_accepted_length=1.2)
                       for row in several]  # fmt: skip
    assert complaints(one_task_of_two) == []


def test_heads_are_named_on_the_command_line():
    shipped = pocket_folder().parent
    told = [f"a={shipped / 'hass'}", f"b=eagle:{shipped / 'eagle'}", "c=hass"]
    assert heads_in(told, "folder") == {
        "a": HeadSource("eagle2", str(shipped / "hass")),
        "b": HeadSource("eagle", str(shipped / "eagle")),
        "c": HeadSource("hass", None),
    }
    assert heads_in([], "pocket") == {each: HeadSource(each, None) for each in ("eagle2", "hass")}


@pytest.mark.parametrize(
    "options, message",
    [
        (Options(head=("a",)), "--head 'a' is not NAME=FOLDER"),
        (Options(head=("plain=hass",)), "plain names something else; rename it"),
        (Options(head=("a=medusa:",)), "names no folder; write NAME=medusa:FOLDER"),
        (Options(target="folder"), "no heads are given; add --head NAME=FOLDER"),
        (Options(runs=0), "runs and max_new_tokens must be at least 1"),
        (Options(temperature=()), "and a temperature"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(SpecjaxError, match=message):
        _run(options)
