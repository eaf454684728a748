"""`specjax generate`, in this process, on a tiny random target."""

import json
import os
import re
import shutil
import signal
from importlib import resources
from io import StringIO
from itertools import groupby
from pathlib import Path

import pytest

from specjax.cli import main
from specjax.cli.chat import HINT, _prompt
from specjax.cli.generation import GenerationRequest
from specjax.cli.generation_output import GenerateOutput
from specjax.cli.live_text import LiveText
from specjax.cli.prompts import INSTRUCTION, SOURCE, read_source
from specjax.core.text import decode
from specjax.decoding.engine import Engine
from specjax.loading.targets import load
from tests.cli.target import SHORT, VOCABULARY

FIELDS = (
    "prompt target dtype padded_width method seed temperature verification is_lossy text "
    "finish_reason tokens num_new_tokens rounds mean_accepted_length seconds tokens_per_second "
    "compile_seconds"
).split()
RENAMED = re.sub(r"\bvalue\b", "element", SOURCE)
POCKET = Path(str(resources.files("specjax"))) / "pocket" / "weights" / "target" / "config.json"


def check_consistent(values: dict):
    assert values["num_new_tokens"] == len(values["tokens"]) <= 24
    assert all(0 <= token < VOCABULARY for token in values["tokens"])
    assert 1 <= values["rounds"] <= values["num_new_tokens"]
    length = values["num_new_tokens"] / values["rounds"]
    assert values["mean_accepted_length"] == pytest.approx(length)
    assert values["seconds"] > 0 <= values["compile_seconds"]
    speed = values["num_new_tokens"] / values["seconds"]
    assert values["tokens_per_second"] == pytest.approx(speed)


def test_json_holds_the_promised_fields_and_the_tokens_of_plain_decoding(generate, tiny_tokenizer):
    options = "--method pld-plus --set num_tokens=8 --temperature 0.8".split()
    values = generate("for value in values:", "--compare", *options)
    check_consistent(values)
    assert values["text"] == decode(tiny_tokenizer, values["tokens"])
    plain = values.pop("plain")
    check_consistent(plain)
    assert values.pop("identical") is True
    assert sorted(values) == sorted(plain) == sorted(FIELDS)
    assert (values["padded_width"], plain["method"]) == (16, "plain")
    assert plain["tokens"] == values["tokens"]
    assert plain["rounds"] == plain["num_new_tokens"]


@pytest.mark.slow
def test_quantised_targets_are_compared_with_themselves(generate, tiny, capsys):
    options = ("count = 1", "--compare", "--quantize")
    assert generate(*options, "int4")["identical"] is True
    options += ("int8", "--dtype", "float32", "--target", str(tiny))
    assert main(["generate", *SHORT, *options]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^pld +[\d.]+ +[\d.]+ +[\d.]+$", out, re.MULTILINE)
    assert re.search(r"^plain +[\d.]+ +[\d.]+ +1.00$", out, re.MULTILINE)
    assert "equal to those of the int8 (float32) target" in out


@pytest.mark.slow
def test_rejection_and_typical_acceptance_do_not_promise_equal_tokens(generate, tiny, capsys):
    options = ("count = 1", "--compare", "--verification")
    greedy = generate(*options, "typical")
    assert (greedy["identical"], greedy["is_lossy"]) == (True, False)
    for verification, is_lossy in (("rejection", False), ("typical", True)):
        drawn = (*options, verification, "--temperature", "0.8")
        values = generate(*drawn)
        assert values["identical"] is None
        assert (values["is_lossy"], values["plain"]["is_lossy"]) == (is_lossy, False)
        assert main(["generate", *SHORT, "--target", str(tiny), *drawn]) == 0
        printed = capsys.readouterr()
        assert ("LOSSY" in printed.out) == ("LOSSY" in printed.err) == is_lossy


def test_text_file_ids_and_standard_input_are_the_same_prompt_and_the_default_is_an_example(
    generate, tiny_tokenizer, tmp_path, monkeypatch, capsys
):
    text = "previous = None\n"
    file = tmp_path / "prompt.txt"
    file.write_text(text, "utf-8-sig")  # as Windows writes it
    ids = ", ".join(str(token) for token in tiny_tokenizer(text)["input_ids"])
    assert generate("--prompt-ids", ids)["tokens"] == generate(text)["tokens"]
    example = read_source(None, None, None, False, None)
    GenerateOutput(is_json=False).source(example)
    assert INSTRUCTION in capsys.readouterr().err
    for prompt, path in ((None, None), ("-", None), (None, Path("-")), (None, file)):
        with file.open() as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            assert read_source(prompt, path, None, False, None).prompt == text
    system, user = read_source(text, None, None, False, "best").prompt
    assert (system, user["content"]) == ({"role": "system", "content": "best"}, text)


def test_a_pipe_sees_the_text_grow_before_programs_that_are_warm_are_compared(
    generate, tiny, capsys, monkeypatch
):
    text, calls, printed = generate("return best")["text"], [], []

    def noted(name, function):
        def call(*arguments):
            calls.append(name)
            printed.append(capsys.readouterr().out)  # before it
            return function(*arguments)

        return call

    for owner, name in ((Engine, "warm_up"), (GenerationRequest, "run"), (LiveText, "add")):
        monkeypatch.setattr(owner, name, noted(name, getattr(owner, name)))
    assert main(["generate", *SHORT, "--target", str(tiny), "return best", "--compare"]) == 0
    assert [name for name in calls if name != "add"] == ["warm_up"] * 2 + ["run"] * 7
    second_run = calls.index("run", calls.index("run") + 1)
    assert "".join(printed[: second_run + 1]) == text + "\n"
    assert len(list(filter(None, printed))) > 2


def test_a_text_ends_before_a_stop_text(generate, tiny, capsys):
    whole = generate("return best")["text"]
    stop = whole[8:11]
    expected = whole[: whole.index(stop)]
    options = ("return best", "--stop", stop, "--stop", "never said")
    values = generate(*options)
    assert (values["text"], values["finish_reason"], values["method"]) == (expected, "stop", "pld")
    assert values["num_new_tokens"] < 24
    assert main(["generate", *SHORT, "--target", str(tiny), *options]) == 0
    captured = capsys.readouterr()
    assert captured.out == expected + "\n"
    assert re.search(r"tokens/s\naccepted length \d.* s of compiling not counted", captured.err)
    assert max(map(len, captured.err.splitlines())) <= 80


def test_a_text_may_go_on_after_eos(generate, tiny, tmp_path):
    values = generate("return best")
    assert values["finish_reason"] == "length"
    folder, eos = Path(shutil.copytree(tiny, tmp_path / "ends")), values["tokens"][3]
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {eos}}}')
    assert eos in load(folder).eos
    assert generate("return best", "--ignore-eos", target=folder)["tokens"] == values["tokens"]


def test_many_prompts_are_continued_line_by_line(generate, tiny, tmp_path, capsys, error_line):
    file = tmp_path / "prompts.jsonl"
    message = {"role": "user", "content": "previous?"}
    rows = [{"prompt": "return best"}, "def f(x):", {"messages": [message]}]
    command = ["generate", *SHORT, "--target", str(tiny), "--prompts"]

    def records(source: Path | str) -> list[dict]:
        assert main([*command, str(source)]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    found = records(file)
    assert [each["prompt"] for each in found] == ["return best", rows[1], [message]]
    expected = [generate("return best"), generate(rows[1]), generate("previous?", "--chat")]
    assert [each["tokens"] for each in found] == [each["tokens"] for each in expected]
    read, write = os.pipe()
    os.write(write, json.dumps(rows).encode())
    os.close(write)
    assert [each["tokens"] for each in records(f"/dev/fd/{read}")] == [
        each["tokens"] for each in found
    ]
    os.close(read)
    file.write_text(json.dumps("best " * 400))
    assert main([*command, str(file)]) == 2
    assert f"{file}:1: " in error_line()
    for record in ('{"question": 1}', '{"messages": []}', '{"prompt": ""}', "[]", "5", "{"):
        file.write_text(f'{{"prompt": "return best"}}\n{record}')
        assert main([*command, str(file)]) == 2
        assert f"{file}:2 is not" in error_line()


def test_a_chat_remembers_and_starts_anew(tiny, tmp_path, capsys, monkeypatch):
    file = tmp_path / "messages"
    prompts, goes_on, resume = [], [], Engine.resume

    def with_progress(engine, params, state, *given):
        goes_on.append(state is not None)
        return resume(engine, params, state, *given)

    monkeypatch.setattr(Engine, "resume", with_progress)
    monkeypatch.setattr(
        "specjax.cli.chat._prompt",
        lambda target, messages: prompts.append(list(messages)) or _prompt(target, messages),
    )
    file.write_text("best?\n\n/help\nvalue\\\nbest?\n/new\nbest?\n/quit\nnever\n")
    with file.open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        command = ["chat", "--target", str(tiny), *SHORT]
        assert main([*command, "--system", "count"]) == 0
    first, second, third = ([message["content"] for message in each] for each in prompts)
    assert first == third == ["count", "best?"]
    assert second[:2] == first and second[3:] == ["value\nbest?"]
    printed = capsys.readouterr()
    assert printed.out.startswith(second[2]) and printed.out.count(second[2] + "\n") >= 2
    assert printed.err.count("accepted length") == 3
    assert printed.err.count(HINT) == 1
    assert [value for value, _ in groupby(goes_on)] == [False, True, False]


def test_a_chat_keeps_no_answer_without_room_and_warns_of_lossy_text(tiny, capsys, monkeypatch):
    """The second message fits the program of the first, but not the model with its answer."""
    long = "best " * 130
    monkeypatch.setattr("sys.stdin", StringIO(f"{long}\nbest?\n/new\nbest?\n"))
    lossy = "--verification", "typical", "--temperature", "1"
    assert main(["chat", "--target", str(tiny), *SHORT, *lossy]) == 0
    notes = capsys.readouterr().err
    assert notes.count("no answer kept") == 1 and "exceed the model's 320 positions" in notes
    assert notes.count("LOSSY") == 2


def test_ctrl_c_drops_each_answer_of_a_chat_and_another_signal_ends_it(
    tiny, capsys, monkeypatch, request
):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    numbers = iter([signal.SIGINT, signal.SIGINT, signal.SIGTERM])

    def interrupted(*_):
        number = next(numbers)
        assert callable(signal.getsignal(number))
        signal.raise_signal(number)

    monkeypatch.setattr("specjax.cli.chat._prompt", interrupted)
    monkeypatch.setattr("sys.stdin", StringIO("best?\n" * 4))
    assert main(["chat", "--target", str(tiny), *SHORT]) == 128 + signal.SIGTERM
    assert capsys.readouterr().err.count("no answer kept: interrupted") == 2


@pytest.mark.slow
def test_a_terminal_sees_the_same_text_in_colour(generate, tiny, capsys, monkeypatch):
    text = generate("value value value", "--method", "pld")["text"]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["generate", *SHORT, "--target", str(tiny), "value value value"]) == 0
    legend, _, shown = capsys.readouterr().out.partition("\n")
    assert "\x1b[32mdrafted and accepted" in legend
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown).rstrip("\n")
    printable = "".join(character for character in text if character.isprintable())
    assert "".join(character for character in plain if character in printable) == printable


def test_a_target_without_a_tokenizer_prints_ids(generate, tiny, tmp_path, capsys):
    ignored = shutil.ignore_patterns("tokenizer*")
    folder = shutil.copytree(tiny, tmp_path / "bare", ignore=ignored)
    values = generate("--prompt-ids", "5,6,7", target=folder)
    assert values["text"] is None
    check_consistent(values)
    assert main(["generate", *SHORT, "--target", str(folder), "--prompt-ids", "5,6,7"]) == 0
    assert capsys.readouterr().out.split() == [str(token) for token in values["tokens"]]
    assert main(["generate", "--target", str(folder), "text"]) == 2
    assert "--prompt-ids" in capsys.readouterr().err


def test_sources_are_where_the_output_was_copied_from(generate, tiny, capsys):
    prompt = [5, 6, 7, 5, 6, 7, 5]
    options = ("--prompt-ids", ",".join(map(str, prompt)), "--attribute")
    values = generate(*options)
    for start, end, source in values["spans"]:
        assert prompt[source : source + end - start] == values["tokens"][start:end]
    assert main(["generate", *SHORT, "--target", str(tiny), *options]) == 0
    assert "copied from" in capsys.readouterr().out


def test_rest_reads_a_datastore_of_the_targets_tokenizer(
    generate, tiny, tmp_path, capsys, error_line
):
    text, store = tmp_path / "text.txt", tmp_path / "store"
    text.write_text("for value in values:\n    total = total + value\n" * 3)
    assert main(["datastore", "build", str(text), "--target", str(tiny), "--out", str(store)]) == 0
    assert "of 1 documents" in capsys.readouterr().out
    rest = ("--method", "rest", "--set", "max_drafted=6", "--drafter", str(store))
    assert generate("--prompt-ids", "1,2,3", *rest, "--compare")["identical"] is True
    metadata = store / "datastore.json"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"fingerprint": "0" * 16}))
    for options, message in (
        (rest, "was built with tokenizer 0000000000000000, but the target's is"),
        (rest[:2], "needs a datastore, which `specjax datastore build` makes; name a folder"),
        (("--method", "pld", "--drafter", "x"), "method 'pld' takes no drafter"),
    ):
        assert main(["generate", "--target", str(tiny), "--prompt-ids", "1,2", *options]) == 2
        assert message in error_line()


@pytest.mark.slow
@pytest.mark.skipif(not POCKET.is_file(), reason="pocket is not trained yet")
def test_pocket_copies_so_prompt_lookup_pays(capsys):
    assert main(["generate", "--json", "--compare"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["identical"] is True
    assert values["mean_accepted_length"] > 2
    assert values["text"] == RENAMED, "the first example is right"
    assert values["finish_reason"] == "eos"
