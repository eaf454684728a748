"""`specjax generate` and `generate_text` under a grammar."""

import json

import pytest

import specjax
from specjax.cli import main
from tests.cli.target import SHORT

SCHEMA = {"type": "object", "properties": {"s": {"enum": ["a", "b"]}}, "required": ["s"]}
CHOICES = ("yes", "no")


def test_texts_follow_the_grammar_on_the_command_line_as_in_python(generate, tiny, tmp_path):
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    target = specjax.load(tiny)
    for options, named, fits in (
        (("--json-schema", str(file)), {"json_schema": SCHEMA}, json.loads),
        (("--choices", *CHOICES), {"choices": CHOICES}, CHOICES.count),
    ):
        printed = generate("Say it: ", *options, "--method", "grammar", "--temperature", "1")
        answer = specjax.generate_text(
            target, "Say it: ", "grammar", max_new_tokens=24, temperature=1.0, **named
        )
        assert printed["text"] == answer.text
        assert printed["finish_reason"] == answer.finish_reason == "eos"
        assert fits(answer.text)


def test_a_text_that_ends_before_its_grammar_is_reported(tiny, capsys):
    options = ["--target", str(tiny), "--regex", "[ab]{50}", *SHORT, "--json"]
    assert main(["generate", "Say it: ", *options]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["finish_reason"] == "length"
    assert "before its grammar" in captured.err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--regex", "a", "--choices", "b"], "keep one of them"),
        (["--regex", "a", "--ignore-eos"], "ends with an end token"),
        (["--regex", "("], "regular expression '(' is not supported"),
        (["--json-schema", "missing.json"], "missing.json cannot be read"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_an_error(options, problem, tiny, error_line):
    assert main(["generate", "Say it: ", "--target", str(tiny), *SHORT, *options]) == 2
    assert problem in error_line()
