"""Requests that `specjax train` rejects before it writes anything."""

import shutil
from copy import deepcopy

import jax.numpy as jnp
import pytest

from specjax.bench.results import make_folder, open_results
from specjax.cli import train_heads
from specjax.core import memory
from specjax.core.errors import SpecjaxError
from specjax.core.folder import RunFolder
from specjax.models.io import huggingface
from specjax.training.run_folder import open_run
from tests.cli.training import SHORT, WORDS


@pytest.mark.parametrize(
    "arguments, name",
    [
        (["--buckets", "64", "32"], "buckets"),
        (["--buckets", "64", "2048"], "320 positions"),
        (["--distill", "--distill-tokens", "320"], "distill_tokens"),
        (["--data", "self", "--limit", "1", "--distill-tokens", "320"], "distill_tokens"),
        (["--data", "missing.jsonl"], "missing.jsonl"),
        (["--data", "."], "Is a directory"),
        (["--target", "nope"], "'nope'"),
        (["--start", "nope"], "'nope'"),
        (["--draft-vocab", "9"], "the head drafts only 9 tokens"),
        (["--limit", "1"], "fewer than two conversations"),
    ],
)
def test_a_bad_request_is_rejected_and_leaves_nothing(train, tmp_path, error_line, arguments, name):
    assert train("hass", tmp_path / "run", *arguments) == 2
    line = error_line()
    assert name in line or name in line.replace("-", "_")
    assert list(tmp_path.iterdir()) == []


def test_data_without_anything_to_learn_is_rejected(train, tmp_path, capsys):
    file = tmp_path / "data.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "value"}]}\n' * 3)
    assert train("eagle", tmp_path / "run", "--data", str(file)) == 2
    *skipped, last = capsys.readouterr().err.splitlines()
    assert "holds no conversation" in last
    assert len(skipped) == 3
    assert not (tmp_path / "run").exists()


def test_a_folder_of_something_else_is_not_overwritten(train, tmp_path, error_line):
    with RunFolder(tmp_path).lock():
        assert train("eagle", tmp_path, "--resume") == 2
    assert "is in use by another run; wait until it ends, or name another folder" in error_line()
    (tmp_path / "head").mkdir()
    assert train("eagle", tmp_path, "--resume") == 2
    assert "holds head, but no training run" in error_line()


def test_training_and_benchmarks_do_not_share_a_folder(train, tmp_path, error_line):
    run, bench = tmp_path / "run", tmp_path / "bench"
    open_results(make_folder(bench), {"target": "tiny"})
    assert train("eagle", bench, "--resume") == 2
    assert "holds run.json, but no training run" in error_line()
    with open_run(run, {}):
        pass
    with pytest.raises(SpecjaxError, match="holds no benchmark"):
        make_folder(run)


def test_a_tokenizer_with_more_tokens_than_the_target_is_rejected(
    train, tiny, tiny_tokenizer, tmp_path, error_line
):
    target = shutil.copytree(tiny, tmp_path / "target")
    tokenizer = deepcopy(tiny_tokenizer)
    tokenizer.add_tokens(WORDS)
    tokenizer.save_pretrained(target)
    assert train("eagle", tmp_path / "run", "--target", str(target), *SHORT) == 2
    assert "outside the vocabulary of 320" in error_line()


def test_a_target_without_a_tokenizer_is_rejected(train, tiny, tmp_path, error_line):
    bare = shutil.copytree(tiny, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    for arguments in (SHORT, (*SHORT, "--distill")):
        assert train("eagle", tmp_path / "run", "--target", str(bare), *arguments) == 2
        assert "has no tokenizer; use a target that has one" in error_line()
    assert not (tmp_path / "run").exists()


def test_dtype_and_memory_are_checked_before_training_starts(
    train, tmp_path, error_line, monkeypatch
):
    monkeypatch.setattr(huggingface, "default_dtype", lambda *_, **__: jnp.dtype("float16"))
    assert train("eagle", tmp_path / "run", *SHORT) == 2
    assert "load the target in bfloat16 or float32" in error_line()
    monkeypatch.setattr(memory, "_host_bytes", lambda: 170_000)
    monkeypatch.setattr(train_heads, "default_dtype", huggingface.default_dtype)  # of an old GPU
    assert train("eagle", tmp_path / "run", *SHORT) == 2
    assert "the training needs at least 0.00" in (line := error_line())
    assert "lower --batch-size" in line
    assert not (tmp_path / "run").exists()
