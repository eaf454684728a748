"""What the command line refuses, and how it says so."""

import os
import signal
import time
from functools import partial

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
from specjax.loading.methods import METHODS
from tests.cli.target import SHORT, VOCABULARY

LONG_NAME = "n" * 300


@pytest.mark.parametrize(
    "arguments, told",
    [
        ([""], "the prompt is empty; write some text"),
        (["b"], "has 1 token(s), but drafters need 2"),
        (["--prompt-ids", f"1,{VOCABULARY}"], f"{VOCABULARY}, outside the vocabulary"),
        (["--prompt-ids=-1,2"], "-1, outside the vocabulary"),
        (["--prompt-ids", "1,x"], "'x' is not a token id; give whole numbers"),
        (["--prompt-ids", "1,,2"], "'' is not a token id"),
        (["--prompt-ids", "1,99999999999999999999"], "is not a token id"),
        (["--prompt-ids", "1,2", "value"], "give one of PROMPT, --prompt-file, --prompt-ids"),
        (["--prompt-ids", "1,2", "--chat"], "leave one of them out"),
        (["best value", "--max-new-tokens", "400"], "generate at most"),
        (["best value", "--max-new-tokens", "0"], "must be at least 1"),
        (["best value", "--temperature", "-0.5"], "`temperature` must be at least 0"),
        (["best value", "--temperature", "nan"], "`temperature` must be finite"),
        (["best value", "--top-p", "0"], "`top_p` must be above 0"),
        (["best value", "--top-p", "1.5"], "`top_p` must be above 0"),
        (["best value", "--top-k", "0"], "`top_k` must be at least 1"),
        (["best value", "--quantize", "int9"], "quantize 'int9' is not supported; use int8 or"),
        (["best value", "--seed", "-1"], "--seed -1 is outside 0 to"),
        (["best value", "--method", "psychic"], "'psychic' is unknown; choose one of plain, pld"),
        (
            ["best value", "--set", "colour=1"],
            "has no setting 'colour'; its settings",
        ),
        (["best value", "--set", "num_tokens"], "is not NAME=VALUE"),
        (["best value", "--set", "num_tokens=few"], "`num_tokens` must be a whole number"),
        (["best value", "--set", "allow_shorter=1"], "`allow_shorter` must be true or false"),
        (["best value", "--set", "num_tokens=0"], "`num_tokens` must be at least 1"),
        (["best value", "--method", "pld-plus", "--set", "layer=7"], "hidden layer 7 does not"),
        (["--prompt-file", "missing.txt"], "missing.txt cannot be read (No such file"),
        (["--prompt-file", "."], "cannot be read (Is a directory)"),
        (["best value", "--target", "nope"], "'nope' is not a target: give 'pocket'"),
        (["best value", "--target", LONG_NAME], "cannot be read (File name too long); check"),
        (["best value", "--target", "~nosuch/x"], "there is no home folder ~nosuch; write"),
    ],
)
def test_a_bad_request_is_one_line_and_exit_code_2(tiny, error_line, arguments, told):
    if "--target" not in arguments:
        arguments = [*arguments, "--target", str(tiny)]
    assert main(["generate", *arguments]) == 2
    assert told in error_line()


def test_bad_prompt_files(tiny, tmp_path, error_line):
    empty, latin = tmp_path / "empty.txt", tmp_path / "latin.txt"
    empty.touch()
    latin.write_bytes("größer".encode("latin-1"))
    for file, told in ((empty, "is empty; write"), (latin, "is not UTF-8 text; convert")):
        assert main(["generate", "--target", str(tiny), "--prompt-file", str(file)]) == 2
        assert told in error_line()


@pytest.mark.parametrize(
    "free, told",
    [
        (100_000, "Loading tiny needs at least 0.000152 GB (weights 0.000152), and cpu has 0.0001"),
        (300_000, "a pass of 11 tokens for 1 sequence(s) needs at least 0.00"),
    ],
)
def test_what_does_not_fit_in_memory_is_refused_before_it_is_compiled(
    tiny, error_line, monkeypatch, free, told
):
    monkeypatch.setattr(memory, "_host_bytes", lambda: free)
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    assert main(["generate", "--target", str(tiny), "--prompt-ids", "5,6,7", *SHORT]) == 2
    line = error_line()
    assert told in line and "use a smaller dtype" in line


def test_a_prompt_without_end_is_refused(tiny, error_line):
    assert main(["generate", "--target", str(tiny), "--prompt-file", "/dev/zero"]) == 2
    assert "/dev/zero holds more than 8 MiB; give a shorter text" in error_line()


def test_arguments_are_utf_8_whatever_the_locale_is(generate, tiny, error_line):
    broken = "best \udcff"
    assert main(["generate", "--target", str(tiny), broken]) == 2
    assert "is not UTF-8 text; convert it first" in error_line()
    as_ascii = "🎉🎉".encode().decode("ascii", "surrogateescape")  # as Python reads it under LANG=C
    assert generate(as_ascii)["prompt"] == "🎉🎉"


def test_bad_target_folders(tmp_path, error_line):
    empty, other = tmp_path / "empty", tmp_path / "other"
    empty.mkdir()
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "gpt2"}')
    for folder, told in ((empty, "has no config.json"), (other, "'gpt2' is not supported")):
        assert main(["generate", "best value", "--target", str(folder)]) == 2
        assert told in error_line()


@pytest.mark.parametrize(
    ("directory", "told"),
    [
        (f"/tmp/{LONG_NAME}", "(File name too long); free some space or choose another path"),
        ("~nosuch/x", "~nosuch/x: there is no home folder ~nosuch; write the path in full"),
        (f"{__file__}/x", "(Not a directory); free some space or choose another path"),
        (__file__, "already exists and is not an empty folder; delete it or choose another name"),
    ],
)
def test_bad_folders_to_convert_into(tiny, error_line, directory, told):
    assert main(["convert", str(tiny), directory]) == 2
    assert error_line().endswith(told)


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
    "method, text, value",
    [
        ("pld", "allow_shorter=True", True),
        ("pld", "max-ngram = 4", 4),
        ("pld-plus", "min_similarity=1", 1.0),
    ],
)
def test_settings_have_the_types_of_their_fields(method, text, value):
    [read] = METHODS.read_settings(method, [text]).values()
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    "method, setting, message",
    [
        ("pld-plus", "layer=9", "hidden layer 9 does not exist: the model has layers 0 to 2"),
        ("pld-plus", "num_tokens=0", "`num_tokens` must be at least 1"),
        ("pld-plus-attention", "heads=((2,0),)", "attention head (layer 2, head 0) does not exist"),
        ("pld-plus-attention", "heads=((0,4),)", "attention head (layer 0, head 4) does not exist"),
        ("pld-plus-attention", "heads=((0,),)", "`heads` must be of type"),
        ("pld-plus-attention", "num_tokens=0", "`num_tokens` must be at least 1"),
        ("lookahead", "num_guesses=0", "num_guesses"),
    ],
)
def test_settings_that_cannot_be_are_refused(tiny, error_line, method, setting, message):
    command = ["generate", "--target", str(tiny), "--method", method, "--prompt-ids", "1,2"]
    assert main([*command, "--set", setting]) == 2
    assert message in error_line()


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize(
    "command, arguments, told",
    [
        (TrainHead, ["train", "eagle"], "the same command with --resume goes on"),
        (BenchCommand, ["bench"], "the same command goes on"),
        (
            TuneMachine,
            ["tune", "machine"],
            "no settings are written",
        ),
        (DatastoreCommand, ["datastore", "build", "x"], "nothing is written; the same command st"),
    ],
)
def test_a_signal_ends_the_work_in_one_line_that_says_how_to_go_on(
    number, code, command, arguments, told, tmp_path, monkeypatch, capsys, request
):
    def run(self):
        os.kill(os.getpid(), number)
        time.sleep(60)  # which the signal cuts short

    before = signal.signal(number, signal.SIG_DFL)  # a job in the background ignores SIGINT
    request.addfinalizer(lambda: signal.signal(number, before))
    monkeypatch.setattr(command, "run", run)
    assert main([*arguments, "--out", str(tmp_path)]) == code
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"specjax: stopped; {told}")
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
