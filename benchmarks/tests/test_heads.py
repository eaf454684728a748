"""Heads and numbers of masks: what is measured, what is checked first, and what is printed."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks import heads
from benchmarks.group_size import GroupSizeOptions, check, train
from benchmarks.heads import HeadOptions, HeadSource, contestants_of, heads_in, speed_table
from specjax import load
from specjax.bench.checks import complaints
from specjax.bench.measure import PLAIN, GeneratedText, Program, Sample
from specjax.bench.summary import ALL, Measurement, summarise
from specjax.core.errors import SpecjaxError
from specjax.hub import pocket_folder
from specjax.tasks import Request


def rows(method: str, accepted: int) -> list[Measurement]:
    """Plain decoding, and a method that accepts `accepted` tokens per round; the same text."""
    batch, tokens = (Request("edit", (1, 2)),), tuple(range(96))
    texts = {PLAIN: GeneratedText(tokens, 96), method: GeneratedText(tokens, 96 // accepted)}
    samples = [
        Sample(name, "float32", batch, 0, repeat, (text,), 0.0, 1.0 / len(name), 0)
        for repeat in range(2)
        for name, text in texts.items()
    ]
    of_edits = summarise(samples, dict.fromkeys(texts, Program()))
    return [*of_edits, *(replace(row, task=ALL) for row in of_edits)]


def test_the_table_has_a_row_per_head_and_a_column_per_task():
    lines = speed_table(rows("eagle2", 4)).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert cells[0] == ["accepted length (x plain)", "edit", "all", "quartiles", "same"]
    assert cells[2] == [PLAIN, "1.00 (1.00x)", "1.00 (1.00x)", "1.00-1.00", "yes"]
    assert cells[3] == ["eagle2", "4.00 (1.20x)", "4.00 (1.20x)", "1.20-1.20", "yes"]


def test_a_head_of_which_nothing_is_accepted_is_called_useless():
    assert complaints(rows("eagle2", 4)) == []
    [line] = complaints(rows("eagle2", 1))
    assert line.startswith("OF NO USE: eagle2: accepted length 1.0")
    assert "in 96 rounds; check that the drafter was trained for this very target" in line
    assert complaints(rows("pld", 1)) == []  # a text may just not repeat itself
    several = rows("eagle2", 1)
    one_task_of_two = [
        row if row.task == "edit" else replace(row, mean_accepted_length=1.2) for row in several
    ]
    assert complaints(one_task_of_two) == []


def test_heads_are_named_on_the_command_line():
    shipped = pocket_folder().parent
    words = [f"a={shipped / 'hass'}", f"b=eagle:{shipped / 'eagle'}", "c=hass"]
    assert heads_in(words, "folder") == {
        "a": HeadSource("eagle2", str(shipped / "hass")),
        "b": HeadSource("eagle", str(shipped / "eagle")),
        "c": HeadSource("hass", None),
    }
    assert heads_in([], "pocket") == {each: HeadSource(each, None) for each in ("eagle2", "hass")}


def test_variants_of_trees_are_measured_beside_the_heads():
    sources = {"h": HeadSource("hass", None), "m": HeadSource("medusa", None)}
    options = HeadOptions(num_tokens=20, dynamic=True, set=("h.depth=3", "m.tree=static"))
    made = contestants_of(load("pocket"), sources, options, 1.0, [Request("x", (5, 6))])
    drafters = {each.name: each.engine.drafter for each in made}
    assert list(drafters) == [
        *("plain", "h (static tree)", "h", "m", "m (dynamic tree)", "h (tree blind to the noise)")
    ]
    assert drafters["h"].num_nodes == drafters["m (dynamic tree)"].num_nodes == 20
    assert drafters["h"].depth == 3
    assert drafters["h (tree blind to the noise)"].noise_share == 0


@pytest.mark.parametrize(
    "options, message",
    [
        (HeadOptions(head=("a",)), "--head 'a' is not NAME=FOLDER"),
        (HeadOptions(head=("plain=hass",)), "plain names something else; rename it"),
        (HeadOptions(head=("a=medusa:",)), "names no folder; write NAME=medusa:FOLDER"),
        (HeadOptions(target="folder"), "no heads are given; add --head NAME=FOLDER"),
        (HeadOptions(runs=0), "runs 0 must be at least 1"),
        (HeadOptions(temperature=()), "no temperature is given"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(SpecjaxError, match=message):
        heads.run(options)


# ---- Numbers of masks --------------------------------------------------------------------------


def test_each_head_is_trained_by_a_command_that_can_be_repeated(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda command, check: seen.append(command) or SimpleNamespace(returncode=0),
    )
    options = GroupSizeOptions(tmp_path, (2,), train="--num-steps 5 --data 'my chats.jsonl'")
    assert train(options, 2) == tmp_path / "masks-2"
    [command] = seen
    assert command[:5] == [sys.executable, "-m", "specjax", "train", "parallel-eagle"]
    assert command[5:9] == ["--num-steps", "5", "--data", "my chats.jsonl"]
    assert command[9:] == [
        *("--target", "pocket", "--out", str(tmp_path / "masks-2"), "--num-masks", "2", "--resume")
    ]
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=2))
    with pytest.raises(SpecjaxError, match="masks-2 stopped"):
        train(options, 2)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"masks": ()}, "different numbers from 1 on"),
        ({"masks": (0, 1)}, "different numbers from 1 on"),
        ({"masks": (1, 1)}, "different numbers from 1 on"),
        ({"runs": 0}, "must be at least 1"),
        ({"train": "--data 'x"}, "cannot be read: No closing quotation"),
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"num_tokens": 1}, "num_tokens 1"),
        ({"tasks": "missing.jsonl"}, "missing.jsonl"),
        ({"target": "nope"}, "'nope' is no"),
    ],
)
def test_what_would_stop_later_is_reported_before_the_training(tmp_path, changed, reason):
    with pytest.raises(SpecjaxError, match=reason):
        check(replace(GroupSizeOptions(tmp_path), **changed))
