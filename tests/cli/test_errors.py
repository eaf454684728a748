"""Invalid requests end with one line and exit code 2; signals and interrupts end the work."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import get_type_hints

import jax
import pytest

from specjax.cli import main
from specjax.cli.bench import BenchCommand
from specjax.cli.datastore import DatastoreCommand
from specjax.cli.generate import Generate
from specjax.cli.train_heads import TrainHead
from specjax.cli.tune import TuneMachine
from specjax.core import memory
from specjax.core.interrupts import SIGNALS, on_signal
from specjax.models.native import is_available
from tests.cli.commands import COMMAND_CLASSES
from tests.cli.target import VOCABULARY
from tests.rejected import rejected_values

REQUIRED = {  # arguments without a default
    "attribute": ["FILE"],
    "train": ["--out", "FOLDER"],
    "datastore": ["build", "FILE", "--out", "FOLDER"],
    "convert": ["TARGET", "FOLDER"],
    "report": ["FOLDER"],
}


@pytest.mark.parametrize(
    "arguments, name",
    [
        ([""], "the prompt is empty"),
        (["b"], "1 token(s)"),
        (["--prompt-ids", f"1,{VOCABULARY}"], f"{VOCABULARY}, outside the vocabulary"),
        (["--prompt-ids", "1,x"], "'x'"),
        (["--prompt-ids", "1,2", "value"], "--prompt-ids"),
        (["--prompt-ids", "1,2", "--chat"], "--chat"),
        (["--prompt-file", "missing.txt"], "missing.txt cannot be read"),
        (["--prompt-file", "empty"], "empty is empty"),
        (["--prompt-file", "latin"], "latin is not UTF-8"),
        (["--prompt-file", "/dev/zero"], "8 MiB"),
        (["best value", "--max-new-tokens", "400"], "400"),
        (["best value", "--quantize", "int9"], "'int9'"),
        (["best value", "--dtype", "int9"], "not one of {float32,bfloat16,float16};"),
        (["best value", "--tuned", "missing.json"], "missing.json cannot be read"),
        (["best value", "--method", "psychic"], "'psychic'"),
        (["best value", "--set", "colour=1"], "'colour'"),
        (["best value", "--set", "num_tokens"], "NAME=VALUE"),
        (["best value", "--set", "=3"], "'=3' is not NAME=VALUE"),
        (["best value", "--top-k", "9" * 30], "--top-k must be"),
        (["best value", "--method", "pld-plus", "--set", "layer=9"], "layer 9"),
        (["best value", "--target", "nope"], "'nope'"),
        (["best value", "--target", "."], "holds no config.json"),
        (["best value", "--target", "gpt2"], "'gpt2' is not supported"),
    ],
)
def test_a_bad_request_is_rejected(tiny, tmp_path, monkeypatch, error_line, arguments, name):
    monkeypatch.chdir(tmp_path)
    Path("latin").write_bytes("größer".encode("latin-1"))
    Path("empty").touch()
    Path("gpt2").mkdir()
    Path("gpt2/config.json").write_text('{"model_type": "gpt2"}')
    if "--target" not in arguments:
        arguments = [*arguments, "--target", str(tiny)]
    assert main(["generate", *arguments]) == 2
    assert name in error_line()


def invalid_values(owner: type) -> Iterator[tuple[str, object]]:
    """The invalid values of the fields of a command, and of the options nested in it."""
    yield from rejected_values(owner)
    for kind in get_type_hints(owner).values():
        if is_dataclass(kind):
            yield from invalid_values(kind)


def bounded_options() -> list:
    """Each option with a value that its bounds exclude, for the first command that has it.

    The first option of each command is quick; the others follow the same rule.
    """
    first = {
        name: (words, str(value))
        for words, command in reversed(COMMAND_CLASSES.items())
        for name, value in invalid_values(command)
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    seen, cases = set(), []
    for name, (words, value) in first.items():
        marks = [pytest.mark.slow] if words in seen else []
        cases.append(pytest.param(words, name, value, marks=marks))
        seen.add(words)
    return cases


@pytest.mark.parametrize("words, name, value", bounded_options())
def test_options_out_of_bounds_are_rejected(words, name, value, error_line):
    option = "--" + name.replace("_", "-")
    arguments = [*words.split(), *REQUIRED.get(words.partition(" ")[0], ())]
    assert main([*arguments, f"{option}={value}"]) == 2
    assert f"{option} must be" in error_line()


NODES = 8 if is_available() else 16  # of a draft of pld, if it is likely to be right


@pytest.mark.parametrize(
    "free, message",
    [
        (100_000, "Loading tiny needs at least 0.000152 GB (weights 0.000152), and cpu has 0.0001"),
        (300_000, f"a pass of {NODES} tokens for 1 sequence(s) needs at least 0.00"),
    ],
)
def test_a_lack_of_memory_is_reported_before_compiling(
    tiny, error_line, monkeypatch, free, message
):
    monkeypatch.setattr(memory, "_host_bytes", lambda: free)
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    prompt = ("--prompt-ids", "5,6,7", "--max-new-tokens", "24")
    assert main(["generate", "--target", str(tiny), *prompt]) == 2
    line = error_line()
    assert message in line and "use a smaller dtype" in line


def test_arguments_are_utf_8_whatever_the_locale_is(tiny, error_line, monkeypatch):
    broken = "best \udcff"
    assert main(["generate", "--target", str(tiny), broken]) == 2
    assert "is not UTF-8 text; convert it first" in error_line()
    read = []
    monkeypatch.setattr(Generate, "run", lambda self: read.append(self.prompt))
    as_ascii = "🎉🎉".encode().decode("ascii", "surrogateescape")  # as Python reads it under LANG=C
    assert main(["generate", as_ascii]) == 0
    assert read == ["🎉🎉"]


def test_an_interrupt_is_quiet_and_a_bug_is_not(capsys, monkeypatch):
    def raises(error):
        monkeypatch.setattr(Generate, "run", lambda self: (_ for _ in ()).throw(error))

    raises(KeyboardInterrupt())
    assert main(["generate"]) == 130
    assert capsys.readouterr() == ("", "")
    raises(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        main(["generate"])


@pytest.mark.parametrize(
    "command, arguments, message, number",
    [
        (TrainHead, "train eagle", "to continue, run the same command with --resume", 15),
        (BenchCommand, "bench", "run the same command to resume", 2),
        (TuneMachine, "tune machine", "no settings are written", 15),
        (DatastoreCommand, "datastore build x", "nothing is written", 2),
    ],
)
def test_a_signal_ends_the_work_in_one_line_that_says_how_to_go_on(
    command, arguments, message, number, tmp_path, monkeypatch, capsys, request
):
    def run(self):
        os.kill(os.getpid(), number)
        time.sleep(60)  # which the signal cuts short

    before = signal.signal(number, signal.SIG_DFL)  # a job in the background ignores SIGINT
    request.addfinalizer(lambda: signal.signal(number, before))
    monkeypatch.setattr(command, "run", run)
    assert main([*arguments.split(), "--out", str(tmp_path)]) == 128 + number
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"specjax: stopped; {message}")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_second_signal_ends_the_process_at_once(request):
    for each in SIGNALS:
        before = signal.signal(each, signal.default_int_handler)
        request.addfinalizer(partial(signal.signal, each, before))
    received = []
    with on_signal(received.append):
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]
        assert [signal.getsignal(each) for each in SIGNALS] == [signal.SIG_DFL] * 2
    assert [signal.getsignal(each) for each in SIGNALS] == [signal.default_int_handler] * 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "--set", "num_tokens=\x1b[31m5"],
        ["bench", "--tasks", "\x1b[31m.jsonl"],
        ["report", "\x1b[31m\x9b"],
    ],
)
def test_no_control_character_reaches_the_terminal(arguments, capsys):
    assert main(arguments) == 2
    output = "".join(capsys.readouterr())
    assert not [mark for mark in output if mark != "\n" and (mark < " " or "\x7f" <= mark < "\xa0")]
