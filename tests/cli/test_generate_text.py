"""`specjax.generate_text` and `stream_text`: the texts that the command line prints."""

import json
import math
import shutil
from functools import partial
from itertools import pairwise

import pytest

import specjax
from specjax import SpecjaxError
from specjax.cli import main
from tests.cli.target import SHORT

PROMPT = "def longest_run(values):"
OTHER = "return best"
SETTINGS = {"max_new_tokens": 24, "temperature": 1.0, "seed": 3}
OPTIONS = ("--temperature", "1", "--seed", "3", "--dtype", "float32")
SCHEMA = {"type": "object", "properties": {"s": {"enum": ["a", "b"]}}, "required": ["s"]}
CHOICES = ("yes", "no")


@pytest.fixture(scope="module")
def target(tiny):
    return specjax.load(tiny, dtype="float32", padded_width=16)  # as SHORT


def test_text_and_messages_go_in_and_text_comes_out(tiny, target, generate, capsys):
    loaded = specjax.load_drafter("pld", target)
    continued = specjax.generate_text(target, PROMPT, "pld", **SETTINGS)
    expected = generate(PROMPT, *OPTIONS)
    assert continued.text == str(continued) == expected["text"]
    assert list(continued.tokens) == expected["tokens"]
    assert continued.finish_reason == "length" and continued.rounds == expected["rounds"]
    answer = specjax.generate_text(target, PROMPT, loaded, chat=True, **SETTINGS)
    assert answer.text == generate(PROMPT, "--chat", *OPTIONS)["text"] != continued.text
    message = [{"role": "user", "content": PROMPT}]
    assert answer == specjax.generate_text(target, message, loaded, **SETTINGS)
    settings = SETTINGS | {"temperature": 1.0, "sampling": specjax.Sampling(0.5, top_p=1.0)}
    assert continued == specjax.generate_text(target, PROMPT, **settings)
    by_name = specjax.generate_text(str(tiny), PROMPT, max_new_tokens=24)
    assert by_name.finish_reason == "length"


def test_a_list_of_prompts_is_a_batch_that_runs_on_where_a_stop_text_ends_one(target):
    generate = partial(specjax.generate_text, target, max_new_tokens=24)
    texts = generate([PROMPT, OTHER])
    assert texts == [generate(PROMPT), generate(OTHER)]
    chats = [[{"role": "user", "content": text}] for text in (PROMPT, OTHER)]
    assert generate(chats) == generate([PROMPT, OTHER], chat=True)
    stop = texts[0].text[4:8]
    stopped, other = generate([PROMPT, OTHER], stop=stop)
    assert (stopped, other.finish_reason) == (generate(PROMPT, stop=stop), "length")


def test_a_stream_shows_whole_characters_and_no_stop_text(target):
    whole = specjax.generate_text(target, PROMPT, **SETTINGS)
    stop = whole.text[24:27]
    parts = [*specjax.stream_text(target, PROMPT, stop=["never said", stop], **SETTINGS)]
    assert len(parts) > 2 and {part.finish_reason for part in parts[:-1]} == {None}
    assert all(after.text.startswith(part.text) for part, after in pairwise(parts))
    assert parts[-1].text == whole.text[: whole.text.index(stop)]
    assert parts[-1].finish_reason == "stop"
    assert parts[-1] == specjax.generate_text(target, PROMPT, stop=stop, **SETTINGS)
    assert parts[-1].tokens == whole.tokens[: len(parts[-1].tokens)]


def test_the_command_line_takes_the_same_controls_and_has_log_probabilities(target, generate):
    word = specjax.generate_text(target, PROMPT, **SETTINGS).text[:4]
    controls = {"min_p": 0.01, "top_k": 5, "repetition_penalty": 1.3, "presence_penalty": 0.5}
    controls |= {"frequency_penalty": 0.25, "min_new_tokens": 5, "logprobs": 2}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in controls.items()]
    options += ["--logit-bias", "40=3", "--logit-bias", "41=-2.5", "--bad-words", word]
    controls |= {"logit_bias": {40: 3.0, 41: -2.5}, "bad_words": [word]}
    text = specjax.generate_text(target, PROMPT, **SETTINGS, **controls)
    assert not text.text.startswith(word)
    as_text = controls | {"bad_words": word}
    assert specjax.generate_text(target, PROMPT, **SETTINGS, **as_text) == text
    records = generate(PROMPT, *OPTIONS, *options)["logprobs"]
    assert [record["token"] for record in records] == list(text.tokens)
    for record, expected in zip(records, text.logprobs, strict=True):
        assert record["raw"] == pytest.approx(expected["raw"], abs=1e-4)
        assert record["processed"] == pytest.approx(expected["processed"], abs=1e-4)
        assert math.exp(record["raw"]) < 1 and len(record["top_raw"]) == 2
        assert record["top_raw"][0][1] >= record["top_raw"][1][1]
        assert sum(math.exp(value) for _, value in record["top_processed"]) <= 1 + 1e-5
    parts = [*specjax.stream_text(target, PROMPT, **SETTINGS, **controls)]
    assert parts[-1] == text
    assert parts[-1].logprobs[0] is parts[0].logprobs[0]  # each record is made once


def test_requests_that_make_no_sense_are_rejected(target):
    for prompt, options, message in (
        ("", {}, "prompt 0 is empty"),
        ([], {}, "no prompts given"),
        (PROMPT, {"temprature": 1.0}, "temprature is not an option of generate_text"),
        (PROMPT, {"stop": ""}, "stop must hold texts"),
        (PROMPT, {"bad_words": [5, 6]}, "bad_words is of type int; pass a text, or a list"),
        (PROMPT, {"top_p": 2.0}, "`top_p` must be above 0 and at most 1"),
    ):
        with pytest.raises(SpecjaxError, match=message):
            specjax.generate_text(target, prompt, **options)
    with pytest.raises(SpecjaxError, match="rounds_per_call 0 must be at least 1"):
        next(specjax.stream_text(target, PROMPT, rounds_per_call=0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--logit-bias", "a=1"), "--logit-bias 'a=1' is not of the form ID=X; pass a token id"),
        (("--logit-bias", "320=1", "--json"), "logit_bias holds token id 320, outside"),
        (("--logprobs", "3"), "--logprobs is part of the JSON output; add --json or --prompts"),
        (("--regex", "a", "--choices", "b"), "keep one of them"),
        (("--choices",), "choices is empty; pass at least one text"),
        (("--regex", "a", "--ignore-eos"), "leave out ignore_eos (--ignore-eos)"),
        (("--regex", "("), "regular expression '(' is not supported"),
        (("--json-schema", "missing.json"), "missing.json cannot be read"),
    ],
)
def test_controls_that_make_no_sense_are_rejected(tiny, error_line, options, message):
    assert main(["generate", PROMPT, *SHORT, "--target", str(tiny), *options]) == 2
    assert message in error_line()


def test_texts_follow_the_grammar_on_the_command_line_as_in_python(tiny, target, tmp_path, capsys):
    def printed(*options):
        command = ["generate", "Say it: ", *SHORT, "--target", str(tiny), "--json", *OPTIONS]
        assert main([*command, "--method", "grammar", *options]) == 0
        captured = capsys.readouterr()
        return json.loads(captured.out), captured.err

    file = tmp_path / "schema.json"
    file.write_text("\ufeff" + json.dumps(SCHEMA))  # as Windows writes it
    for options, named, fits in (
        (("--json-schema", str(file)), {"json_schema": SCHEMA}, json.loads),
        (("--choices", *CHOICES), {"choices": CHOICES}, CHOICES.count),
    ):
        values, _ = printed(*options)
        answer = specjax.generate_text(target, "Say it: ", "grammar", **SETTINGS, **named)
        assert values["text"] == answer.text
        assert values["finish_reason"] == answer.finish_reason == "eos"
        assert fits(answer.text)
    values, notes = printed("--regex", "[ab]{50}")
    assert values["finish_reason"] == "length"
    assert "before its grammar" in notes


def test_a_continuation_keeps_the_space_of_its_first_word(tiny, generate, tmp_path, capsys):
    """Decoders of SentencePiece drop a space at the start of a text."""
    folder = shutil.copytree(tiny, tmp_path / "target")
    values = json.loads((folder / "tokenizer.json").read_text())
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    values["decoder"] = {"type": "Sequence", "decoders": [values["decoder"], strip]}
    (folder / "tokenizer.json").write_text(json.dumps(values))
    target = specjax.load(folder, padded_width=16)
    options = {"choices": [" best"], "max_new_tokens": 24}
    texts = partial(specjax.generate_text, target, "return", "grammar", **options)
    assert (texts().text, texts(chat=True).text) == (" best", "best")
    command = "return", "--choices", " best"
    assert generate(*command, target=folder)["text"] == " best"
    assert main(["generate", *command, *SHORT, "--target", str(folder)]) == 0
    assert capsys.readouterr().out == " best\n"
