"""Heads with few and many masks: what is told to the training, checked before it, and drawn."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from specjax.bench import group_size
from specjax.bench.group_size import Options, check, draw, train
from specjax.core.errors import SpecjaxError
from tests.bench.test_heads import rows


def test_each_head_is_trained_by_a_command_that_can_be_repeated(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda command, check: seen.append(command) or SimpleNamespace(returncode=0),
    )
    options = Options(tmp_path, masks=(2,), train="--num-steps 5 --data 'my chats.jsonl'")
    assert train(options, 2) == tmp_path / "masks-2"
    [command] = seen
    assert command[:5] == [sys.executable, "-m", "specjax", "train", "parallel-eagle"]
    given = command[5:]
    assert given[:4] == ["--num-steps", "5", "--data", "my chats.jsonl"]
    assert given[4:] == [
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
        ({"target": "nope"}, "'nope' is not a target"),
        ({"max_new_tokens": 99999}, "exceed the model's"),
    ],
)
def test_what_would_stop_later_is_told_before_the_training(tmp_path, changed, reason):
    with pytest.raises(SpecjaxError, match=reason):
        check(replace(Options(tmp_path), **changed))


def test_a_missing_matplotlib_is_told_before_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(group_size, "find_spec", lambda name: None)
    with pytest.raises(SpecjaxError, match="pip install matplotlib"):
        check(Options(tmp_path))


def test_the_curve_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    measured = [*rows("K=1", 2), *rows("K=3", 4)]
    path = Path(tmp_path) / "group-size.png"
    draw(measured, (1, 3), path)
    assert path.read_bytes().startswith(b"\x89PNG")
