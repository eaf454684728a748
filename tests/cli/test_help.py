"""The help of every command."""

import re

import pytest
import tyro

from specjax.cli import COMMANDS, main
from specjax.cli.help import command_help
from specjax.cli.options import union_of
from specjax.cli.train import train_commands
from specjax.cli.tune import TUNE_COMMANDS

FLAG = re.compile(r"^[│ ]*(--[a-z][a-z0-9-]*)", re.MULTILINE)
LEAVES = {name: kind for name, kind in COMMANDS.items() if name not in ("train", "tune")}
LEAVES |= {f"tune {name}": kind for name, kind in TUNE_COMMANDS.items()}
LEAVES |= {f"train {name}": kind for name, kind in train_commands().items()}


@pytest.mark.parametrize("words", ["", "train", "tune", *LEAVES])
def test_help_fits_80_columns_in_plain_words(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*words.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith(f"usage: specjax {words}".rstrip())
    assert not re.search(r"\{None\}|None\b|\(default: \)|\bSTR\b", text)
    assert "examples:" in text or words not in LEAVES


def test_help_shows_the_defaults_that_count_for_a_method():
    text = command_help("specjax train medusa", LEAVES["train medusa"])
    assert re.search(r"--learning-rate X .*?\(default: 0.002\)", text, re.DOTALL)
    assert re.search(r"--clip value.*?\(default: norm\)", text, re.DOTALL)


@pytest.mark.parametrize("words", LEAVES)
def test_help_shows_every_option_that_is_parsed_and_no_other(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        tyro.cli(
            union_of({"this": LEAVES[words], "other": LEAVES["methods"]}),
            args=["this", "--help"],
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    parsed = set(FLAG.findall(capsys.readouterr().out)) - {"--help"}
    text = command_help(words, LEAVES[words])
    assert set(FLAG.findall(text)) == parsed
    assert "other options" not in text
    for option in re.findall(r"^  (\S+)$", text, re.MULTILINE):
        assert option.startswith("--"), "every option has a description"


def test_help_of_tune_and_train_lists_what_there_is(capsys):
    for words, commands in (("tune", TUNE_COMMANDS), ("train", train_commands())):
        assert main([words, "--help"]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"usage: specjax {words} WHAT [options]")
        assert all(re.search(rf"^  {name}\b", text, re.MULTILINE) for name in commands)


def test_completion_for_a_shell_knows_commands_and_options(tmp_path):
    file = tmp_path / "completion"
    with pytest.raises(SystemExit) as stop:
        main(["--tyro-write-completion", "bash", str(file)])
    assert not stop.value.code
    assert all(
        word in file.read_text() for word in ("generate", "max-new-tokens", "parallel-eagle")
    )
