"""Results that kills must not change, read from the folders of runs."""

import json

import pytest

from benchmarks.faults import contents
from specjax.core.errors import SpecjaxError


def write(file, *rows):
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_weights_and_metrics_count_and_times_do_not(tmp_path):
    runs = {"a": (b"1", 0.5), "b": (b"1", 0.5), "c": (b"2", 0.5), "d": (b"1", 1)}
    for name, (weights, loss) in runs.items():
        seconds = {"tokens_per_second": len(name) * ord(name)}
        write(tmp_path / name / "metrics.jsonl", {"step": 1, "loss": loss, **seconds})
        (tmp_path / name / "head").mkdir()
        (tmp_path / name / "head" / "model.safetensors").write_bytes(weights)
    whole, same, other_weights, other_loss = (contents("train", tmp_path / each) for each in "abcd")
    assert whole == same
    assert whole != other_weights and whole != other_loss


def test_tokens_count_and_a_turn_that_was_measured_twice_is_refused(tmp_path):
    def turn(tokens, repeat=0):
        runs = [{"method": "pld", "texts": [{"tokens": tokens}], "decode_seconds": repeat}]
        return {"number": 0, "repeat": repeat, "runs": runs}

    write(tmp_path / "a" / "samples.jsonl", turn([1, 2]), turn([1, 2], 1))
    write(tmp_path / "b" / "samples.jsonl", turn([1, 2]), turn([1, 3], 1))
    write(tmp_path / "c" / "samples.jsonl", turn([1, 2]), turn([1, 2]))
    assert contents("bench", tmp_path / "a") != contents("bench", tmp_path / "b")
    with pytest.raises(SpecjaxError, match=r"turn \(0, 0\) was measured twice"):
        contents("bench", tmp_path / "c")
