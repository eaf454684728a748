"""Help, errors in the arguments, and shell completion."""

import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from specjax.cli import COMMANDS, main
from specjax.cli.parser import flags_of
from specjax.core.settings import field_texts
from tests.cli.commands import COMMAND_CLASSES

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("words", ["", "train", "tune"])
def test_help_of_a_group_lists_its_commands(words, capsys, monkeypatch):
    text = help_of(words, capsys, monkeypatch)
    assert re.findall(r"• ([\w-]+)", text) == list(COMMANDS[words].load() if words else COMMANDS)


@pytest.mark.parametrize("words", COMMAND_CLASSES)
def test_every_option_is_documented(words, capsys, monkeypatch):
    flags = set(re.findall(r"--[a-z][a-z0-9-]*", help_of(words, capsys, monkeypatch)))
    assert set(flags_of(COMMAND_CLASSES[words])) <= flags
    assert undocumented_fields(COMMAND_CLASSES[words]) == []


def help_of(words: str, capsys, monkeypatch) -> str:
    """Returns the help of a command, which must fit 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*words.split(), "--help"]) == 0
    usage, *lines = (text := capsys.readouterr().out).splitlines()
    assert usage.startswith(f"usage: specjax {words}".rstrip())
    assert max(map(len, lines)) <= 80
    assert not any(re.search(r"None|\(default: \)", line) for line in lines)
    return text


def undocumented_fields(owner: type) -> list[str]:
    hints, texts = get_type_hints(owner), field_texts(owner)
    names = []
    for field in fields(owner):
        if is_dataclass(hints[field.name]):
            names += undocumented_fields(hints[field.name])
        elif not texts.get(field.name):
            names.append(field.name)
    return names


@pytest.mark.parametrize(
    "arguments, parts",
    [
        ("generat", ["no command generat", "did you mean generate?", "`specjax --help`"]),
        ("train", ["`specjax train` needs one of medusa, hydra, eagle, hass"]),
        ("train eagle", ["needs --out FOLDER"]),
        ("generate one two", ["'two'", "in quotes"]),
        ("generate --seed", ["--seed needs a value"]),
        ("generate --verification blind", ["'blind'", "{coupled,rejection,typical}"]),
        ("generate --prompt x", ["no option --prompt;", "did you mean --prompts?"]),
        ("tune machine --kinds x", ["`specjax tune machine` has no option --kinds"]),
    ],
)
def test_arguments_that_do_not_parse_are_one_line(error_line, arguments, parts):
    assert main(arguments.split()) == 2
    line = error_line()
    assert all(part in line for part in parts)


def test_completion_knows_commands_and_options(tmp_path):
    file = tmp_path / "completion"
    assert main(["--tyro-write-completion", "bash", str(file)]) == 0
    words = ("generate", "max-new-tokens", "parallel-eagle", "num-steps")
    assert all(word in file.read_text() for word in words)


def test_help_does_not_import_what_it_does_not_need():
    code = """
import sys
from specjax.cli import main
main(["--help"])
assert not {"jax", "flax", "numpy"} & set(sys.modules)
main(["train", "hass", "--help"])
print(sorted({"grain", "transformers", "orbax", "tensorboardX"} & set(sys.modules)))
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.endswith("\n[]\n")
