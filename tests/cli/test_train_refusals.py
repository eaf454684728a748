"""What `specjax train eagle` and `hass` refuse, before anything is written; and their help."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from specjax.cli import main
from specjax.cli.train_heads import read_all
from specjax.core import memory
from specjax.core.folder import RunFolder
from specjax.models.config import TransformerConfig
from specjax.models.heads.eagle import EagleConfig, EagleHead
from specjax.models.io import huggingface
from specjax.models.io.formats.eagle import EAGLE
from specjax.models.io.head_files import save_head
from tests.cli import training
from tests.cli.target import CONFIG
from tests.cli.training import SHORT, SMALL, write_chats

ROOT = Path(__file__).resolve().parents[2]
ANSWERS_LATER = '{"messages": [{"role": "user", "content": "value"}]}\n'


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_chats(tmp_path_factory.mktemp("data") / "chats.jsonl", with_texts=False)


@pytest.fixture(scope="module")
def train(tiny, data):
    """Runs `specjax train METHOD --out OUT` with arguments of one's own; returns the exit code."""
    return lambda method, out, *arguments: training.train(method, out, tiny, data, *arguments)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--num-steps", "0"], "`num_steps` must be at least 1, got 0"),  # one field of each group
        (["--learning-rate", "nan"], "`learning_rate` must be finite, got nan"),
        (["--batch-size", "0"], "`batch_size` must be at least 1, got 0"),
        (["--top-p", "0"], "`top_p` must be above 0 and at most 1, got 0.0"),
        (["--distill-tokens", "0"], "`distill_tokens` must be at least 1, got 0"),
        (["--epochs", "-1"], "`epochs` must be at least 0, got -1.0"),
        (["--limit", "0"], "`limit` must be at least 1, got 0"),
        (["--buckets", "64", "2048"], "longest 2048 exceeds the target's 320 positions"),
        (["--distill", "--distill-tokens", "320"], "distill_tokens 320 leaves no room"),
        (["--eval-tokens", "318"], "leaves room for the 318 tokens to measure on in texts of"),
        (["--data", "missing.jsonl"], "missing.jsonl does not exist and is not a hub id"),
        (["--data", "."], "cannot be read (Is a directory)"),
        (["--target", "nope"], "'nope' is not a target"),
        (["--start", "nope"], "'nope' is not a head"),
        (["--limit", "1"], "fewer than two conversations, but one is needed to train on"),
    ],
)
def test_a_bad_request_is_one_line_and_leaves_nothing(
    train, tmp_path, error_line, arguments, message
):
    assert train("hass", tmp_path / "run", *arguments) == 2
    assert message in error_line()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--decay", "--clip", "--top-loss", "--dtype"])
def test_an_unknown_choice_is_refused_by_the_parser(train, tmp_path, error_line, option):
    assert train("hass", tmp_path / "run", option, "wild") == 2
    assert "'wild'" in error_line()


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "holds no conversation to learn from (it is empty)"),
        (ANSWERS_LATER * 3, "(3 without assistant turns)"),
        ("{broken\n" * 5, "(5 not JSON)"),
    ],
)
def test_data_without_anything_to_learn_is_refused(train, tmp_path, capsys, content, message):
    file = tmp_path / "data.jsonl"
    file.write_text(content)
    assert train("eagle", tmp_path / "run", "--data", str(file)) == 2
    printed = capsys.readouterr()
    *skipped, last = printed.err.splitlines()
    assert message in last
    assert len(skipped) == min(3, content.count("\n"))
    assert all(line.endswith("skipping this line") for line in skipped)
    assert not (tmp_path / "run").exists()


def test_texts_that_are_too_long_to_measure_on_are_refused(train, tmp_path, error_line):
    file = tmp_path / "data.jsonl"
    row = {"prompt": "best value in total " * 4, "response": "max"}
    file.write_text((json.dumps(row) + "\n") * 4)
    assert train("eagle", tmp_path / "run", *SMALL, "--longest", "20", "--data", str(file)) == 2
    assert "none of 1 prompts leaves room for the 8 tokens to measure on" in error_line()
    assert not (tmp_path / "run").exists()


def test_broken_lines_are_skipped_and_counted(data, tmp_path, capsys):
    """And what is left is what the file holds without them."""
    file = tmp_path / "data.jsonl"
    lines = data.read_text().splitlines(True)
    file.write_text("".join(["{broken\n", *lines[:5], '{"x": 1}\n', "\n", *lines[5:]]))
    assert read_all([str(file)], None, 0, True) == read_all([str(data)], None, 0, True)
    reported = capsys.readouterr().err.splitlines()
    assert len(reported) == 3
    assert reported[0].startswith(f"specjax: {file}:1 is not JSON")
    assert reported[2].endswith(f"lines of {file}: 1 not JSON, 1 of no known form.")


@pytest.mark.parametrize(
    "out, message",
    [
        (f"{__file__}/run", "(Not a directory); free some space or choose another path"),
        (__file__, "(Not a directory); free some space or choose another path"),
        (f"/tmp/{'n' * 300}", "(File name too long); free some space or choose another path"),
        ("~nosuch/x", "there is no home folder ~nosuch; write the path in full"),
    ],
)
def test_an_output_folder_that_cannot_be_is_refused_before_anything(out, message, error_line):
    assert main(["train", "eagle", "--out", out, "--data", "missing.jsonl"]) == 2
    assert error_line().endswith(message)


def test_a_head_without_its_run_is_not_written_over(train, tmp_path, error_line):
    (tmp_path / "head").mkdir()
    assert train("eagle", tmp_path, *SHORT, "--resume") == 2
    assert "already exists, but no run" in error_line()


def test_a_folder_takes_one_run_at_a_time(tmp_path, error_line):
    with RunFolder(tmp_path).lock():
        arguments = ("--out", str(tmp_path), "--data", "missing.jsonl", "--resume")
        assert main(["train", "eagle", *arguments]) == 2
    assert "is in use by another run; wait until it ends, or name another folder" in error_line()


def test_a_target_without_a_tokenizer_is_refused(train, tiny, tmp_path, error_line):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny / name, bare / name)
    for arguments in (SHORT, (*SHORT, "--distill")):
        assert train("eagle", tmp_path / "run", "--target", str(bare), *arguments) == 2
        assert "has no tokenizer; use a target that has one" in error_line()
    assert not (tmp_path / "run").exists()


def test_a_training_that_cannot_be_is_refused_before_it_starts(
    train, tmp_path, error_line, monkeypatch
):
    monkeypatch.setattr(huggingface, "default_dtype", lambda num_params: jnp.dtype("float16"))
    assert train("eagle", tmp_path / "run", *SHORT) == 2
    assert "load the target in bfloat16 or float32: --dtype bfloat16" in error_line()
    monkeypatch.setattr(memory, "_host_bytes", lambda: 170_000)
    assert train("eagle", tmp_path / "run", *SHORT, "--dtype", "float32") == 2
    assert "the training needs at least 0.00" in (line := error_line())
    assert "lower --batch-size" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden_size": 64}, "target of hidden_size 64, but this one has 32"),
        ({"vocab_size": 99}, "target of vocab_size 99, but this one has 320"),
        ({}, "was trained for target another"),
    ],
)
def test_a_head_of_another_target_is_no_start(train, tmp_path, error_line, change, message):
    config = TransformerConfig(**{**vars(CONFIG), **change})
    head = EagleHead(EagleConfig.for_target(config))
    params = head.initialise(jax.random.key(0))
    about = None if change else {"target": "another"}
    save_head(tmp_path / "head", EAGLE, head, params, jnp.float32, target=config, about=about)
    assert train("eagle", tmp_path / "run", *SHORT, "--start", str(tmp_path / "head")) == 2
    assert message in error_line()
    assert not (tmp_path / "run").exists()


# ---- The command line ---------------------------------------------------------------------------


def test_help_answers_without_jax_and_the_help_of_methods_without_transformers():
    code = """
import sys
from specjax.cli import main
for words in ([], ["train"], ["train", "eagle"], ["train", "hass"], ["train", "disco"]):
    try:
        main([*words, "--help"])
    except SystemExit as stop:
        assert stop.code == 0
    assert words or not {"jax", "flax", "numpy"} & set(sys.modules)
print(sorted({"grain", "transformers", "orbax", "tensorboardX"} & set(sys.modules)))
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    text, _, loaded = ran.stdout.rstrip().rpartition("\n")
    assert loaded == "[]"
    for word in ("--out FOLDER", "--resume", "--distill", "--align-steps", "--learning-rate"):
        assert word in text
    assert "{None}" not in text
