"""Damaged files and hostile arguments: one line of reason or a sound result, and nothing else."""

import io
import json
import random
import resource
import shutil
import signal
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specjax.cli import main
from specjax.cli.generate import Generate
from specjax.cli.parser import flags_of
from specjax.core.errors import SpecjaxError
from specjax.data.task_files import read_questions
from specjax.loading.methods import METHODS
from specjax.models.config import TransformerConfig
from specjax.models.families import FAMILIES, config_from, config_values, read_config
from specjax.models.io.gguf import load_gguf
from specjax.models.io.weights import stored_tensors
from tests.cli.target import CONFIG, write_target
from tests.models.checkpoints import TINY
from tests.rejected import rejected_values

pytestmark = pytest.mark.slow
INPUTS = 2000
SECONDS = 60  # of the processor: a hang, however busy the machine is
MAX_GROWTH = 2**30  # bytes
ABSURD: tuple[Any, ...] = (
    *(0, -1, 1, 3, 2**31, 2**63, 10**30, -(10**30), 0.5, 1e308, float("nan"), float("inf")),
    *("", "x", "\x00", "\ud800", "F32", "llama", None, True, False, [], [[]], {}, {"": []}),
    *([0] * 50, [-1, 2**63], ["x"], {"rope_type": "yarn"}, {"factor": "2"}, "9" * 5000),
)
NUMBERS = (0, 1, 2**7, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1)


@contextmanager
def within_bounds() -> Iterator[None]:
    """Fails if the block hangs, or if the process grows by more than 1 GiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    old = signal.signal(signal.SIGPROF, lambda *_: pytest.fail("it hangs"))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < MAX_GROWTH


def count_handled(inputs: Iterator[Any], read: Callable[[Any], Any]) -> int:
    """Reads all inputs and returns how many were rejected; any error but ours fails."""
    refused = 0
    with within_bounds():
        for number, content in enumerate(inputs):
            try:
                read(content)
            except SpecjaxError as error:
                refused += 1
                assert "\n" not in str(error), (number, str(error)[:500])
            except BaseException as error:
                raise AssertionError(f"input {number}: {content!r:.2000}") from error
    assert number + 1 == INPUTS
    return refused


def rewrite(path: Path, content: bytes) -> Path:
    """Makes a new file; some file systems write an old one to the disk before they go on."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    return path


def damaged(draw: random.Random, content: bytes) -> bytes:
    """Changes, cuts, repeats or drops some bytes."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(changed) or 1)
        kind = draw.randrange(6)
        if kind == 0:
            changed[at : at + 1] = bytes([draw.randrange(256)])
        elif kind == 1:
            changed[at : at + 8] = struct.pack("<Q", draw.choice(NUMBERS))
        elif kind == 2:
            changed[at : at + 4] = struct.pack("<I", draw.choice(NUMBERS) & 0xFFFFFFFF)
        elif kind == 3:
            del changed[at : at + draw.choice((1, 8, 100))]
        elif kind == 4:
            changed[at:at] = changed[at : at + draw.choice((1, 8, 100))]
        else:
            del changed[at:]
    return bytes(changed)


def mutated(draw: random.Random, value: Any) -> Any:
    """Changes one part of a JSON value, however deep it is."""
    if draw.random() < 0.3 or not (value and isinstance(value, dict | list)):
        return draw.choice(ABSURD)
    if isinstance(value, list):
        at = draw.randrange(len(value))
        return [mutated(draw, each) if number == at else each for number, each in enumerate(value)]
    name, changed = draw.choice(list(value)), dict(value)
    if draw.random() < 0.15:
        del changed[name]
    else:
        changed[name] = mutated(draw, value[name])
    return changed


def as_json(draw: random.Random, value: Any) -> bytes:
    """Writes a value, sometimes with damaged bytes."""
    content = json.dumps(value).encode()
    return damaged(draw, content) if draw.random() < 0.2 else content


def test_headers_of_safetensors(tmp_path):
    def inputs() -> Iterator[bytes]:
        draw = random.Random(0)
        header = {
            "__metadata__": {"format": "pt"},
            "model.norm.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
            "lm_head.weight": {"dtype": "BF16", "shape": [2, 4], "data_offsets": [16, 32]},
        }
        for _ in range(INPUTS):
            text = as_json(draw, mutated(draw, header) if draw.random() < 0.8 else header)
            length = len(text) if draw.random() < 0.9 else draw.choice(NUMBERS)
            whole = struct.pack("<Q", length) + text + bytes(32)
            yield damaged(draw, whole) if draw.random() < 0.3 else whole

    def read(content: bytes) -> None:
        rewrite(tmp_path / "model.safetensors", content)
        for tensor in stored_tensors(tmp_path).values():
            assert tensor.read().shape == tensor.shape

    assert 0.5 * INPUTS < count_handled(inputs(), read) < INPUTS


def test_headers_of_gguf(tmp_path):
    pytest.importorskip("gguf")
    from tests.models.test_gguf import sentencepiece, write

    whole = write(tmp_path / "whole.gguf", tokenizer=sentencepiece).read_bytes()
    start = 2 + whole.rindex(b"weight")  # where the data begin, or a little before

    def inputs() -> Iterator[bytes]:
        draw = random.Random(0)
        for _ in range(INPUTS):
            yield damaged(draw, whole[:start]) + whole[start:]

    def read(content: bytes) -> None:
        config, params, _ = load_gguf(rewrite(tmp_path / "m.gguf", content), "float32")
        assert params["embed_tokens"]["weight"].shape == (config.vocab_size, config.hidden_size)

    assert 0.5 * INPUTS < count_handled(inputs(), read) < INPUTS


def test_configs(tmp_path):
    def inputs() -> Iterator[bytes]:
        draw = random.Random(0)
        whole = [config_values(config_from(TINY | {"model_type": "llama"}))]
        whole += [whole[0] | {"model_type": kind, "n_embd": 32, "n_head": 4} for kind in FAMILIES]
        for values in whole:
            values["rope_scaling"] = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}
            values["layer_types"] = ["full_attention", "sliding_attention"]
            values["quantization_config"] = None
        for _ in range(INPUTS):
            values = draw.choice(whole)
            for _ in range(draw.randint(1, 3)):
                values = mutated(draw, values)
            yield as_json(draw, values)

    def read(content: bytes) -> None:
        rewrite(tmp_path / "config.json", content)
        config = read_config(tmp_path)
        assert isinstance(config, TransformerConfig)
        config_values(config)

    assert 0.5 * INPUTS < count_handled(inputs(), read) < INPUTS


QUESTIONS = (
    {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]},
    {"prompt": "def f():", "test_list": ["assert f()"], "code": "pass"},
    {"instruction": "Add.", "input": "1, 2", "output": "3"},
    {"question": "How many?", "answer": "3"},
    {"article": "Long.", "highlights": "Short."},
)


def test_files_of_questions(tmp_path, capsys):
    def inputs() -> Iterator[bytes]:
        draw = random.Random(0)
        for _ in range(INPUTS):
            rows = [mutated(draw, draw.choice(QUESTIONS)) for _ in range(draw.randint(1, 3))]
            if draw.random() < 0.3:
                yield as_json(draw, rows)
            else:
                yield b"\n".join(as_json(draw, row) for row in rows)

    def read(content: bytes) -> None:
        questions = read_questions(rewrite(tmp_path / "tasks.jsonl", content))
        assert all(turn.strip() for question in questions for turn in question.turns)
        assert all(line.startswith("specjax: ") for line in capsys.readouterr().err.splitlines())

    assert 0.1 * INPUTS < count_handled(inputs(), read) < INPUTS


# ---- The command line ---------------------------------------------------------------------------

COMMAND_LINES = 150
HOSTILE = (
    *("", " ", "x", "-1", "0", "0.5", "1e400", "nan", "inf", "9" * 30, "--", "true", "[1]", "{}"),
    *("\x1b[31m5", "\x9b", "\u202e", "ü\n", "🎉" * 99, "a=b=c", "x" * 5000, "/dev/zero", "/"),
)
PROMPTS = (
    {"prompt": "def f():"},
    {"prompt_ids": [5, 6, 7]},
    {"messages": [{"role": "user", "content": "Rename \x1b[31m."}], "id": 3},
)
REQUEST = ("--prompt-ids", "5,6,7", "--max-new-tokens", "2")
PLAIN = ("--method", "plain")


def hostile_files(draw: random.Random, folder: Path) -> Iterator[list[str]]:
    """Yields command lines that read a damaged GGUF file, config or file of prompts.

    They do not draft, since whatever still works is compiled.
    """
    from tests.models.test_gguf import sentencepiece, write

    whole = write(folder / "whole.gguf", tokenizer=sentencepiece).read_bytes()
    start = whole.rindex(b"weight")
    values = json.loads((folder / "tiny" / "config.json").read_text())
    damaged_model = shutil.copytree(folder / "tiny", folder / "damaged")
    while True:
        content = damaged(draw, whole[:start]) + whole[start:]
        if draw.random() < 0.3:
            content = content.replace(b"output_norm", b"\x1b[31m_norm")
        yield [*REQUEST, *PLAIN, "--target", str(rewrite(folder / "m.gguf", content))]
        rewrite(damaged_model / "config.json", as_json(draw, mutated(draw, values)))
        yield [*REQUEST, *PLAIN, "--target", str(damaged_model)]
        lines = b"\n".join(as_json(draw, mutated(draw, draw.choice(PROMPTS))) for _ in range(2))
        path = str(rewrite(folder / "prompts.jsonl", lines))
        yield ["--prompts", path, *REQUEST[2:], *PLAIN, "--target", str(folder / "tiny")]


def hostile_arguments(draw: random.Random, folder: Path) -> Iterator[list[str]]:
    """Yields command lines with an option, or a setting of a method, that is mostly invalid."""
    options = [flag for flag in flags_of(Generate) if flag not in ("--prompts", "--target")]
    target = ["--target", str(folder / "tiny")]
    while True:
        yield [*REQUEST, *target, f"{draw.choice(options)}={draw.choice(HOSTILE)}"]
        method = draw.choice([name for name in METHODS if name != "auto"])
        name, value = draw.choice(list(rejected_values(METHODS[method].drafter)) or [("x", 1)])
        value = draw.choice([value, value, draw.choice(HOSTILE)])
        yield [*REQUEST, *target, "--method", method, "--set", f"{name}={value}"]


@pytest.mark.parametrize("seed", [0, 1])
def test_command_lines(seed, tmp_path, monkeypatch, capsys):
    """Each works, or ends with code 2 and lines of specjax, without control characters."""
    pytest.importorskip("gguf")
    write_target(tmp_path / "tiny", replace(CONFIG, num_hidden_layers=1))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    draw, codes = random.Random(seed), Counter()
    sources = [hostile_files(draw, tmp_path), hostile_arguments(draw, tmp_path)]
    for number in range(COMMAND_LINES):
        arguments = next(sources[number % 2])
        with within_bounds():
            code = main(["generate", *arguments])
        printed = capsys.readouterr()
        text = (number, arguments, code, printed.out[-500:], printed.err[-2000:])
        codes[code] += 1
        assert code in (0, 2), text
        lines = printed.err.splitlines()
        if code:
            assert lines and all(line.startswith("specjax: ") for line in lines), text
        shown = printed.err + printed.out * (code != 0)  # a pipe gets the generated text as it is
        assert not [x for x in shown if x != "\n" and (x < " " or "\x7f" <= x < "\xa0")], text
    assert 0.5 * COMMAND_LINES < codes[2] < COMMAND_LINES
