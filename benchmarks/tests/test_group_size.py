"""Numbers of masks: how their heads are trained, and what is checked first."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.group_size import GroupSizeOptions, check, train
from specjax.core.errors import SpecjaxError


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
        ({"temperature": -1.0}, "`temperature` must"),
        ({"num_tokens": 1}, "`num_tokens` must"),
        ({"tasks": "missing.jsonl"}, "missing.jsonl"),
        ({"target": "nope"}, "'nope' is no"),
    ],
)
def test_what_would_stop_later_is_reported_before_the_training(tmp_path, changed, reason):
    with pytest.raises(SpecjaxError, match=reason):
        check(replace(GroupSizeOptions(tmp_path), **changed))
