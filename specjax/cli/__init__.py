"""The command line: parse, call, print.

A command is a frozen dataclass: its fields are the options, its `run` does the work. Heavy imports
are inside `run`, so that help and errors in the options appear at once.
"""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from difflib import get_close_matches
from functools import partial
from io import StringIO
from typing import Any

import tyro

from specjax import __version__
from specjax.cli.attribute import Attribute
from specjax.cli.bench import BenchCommand
from specjax.cli.chat import Chat
from specjax.cli.convert import Convert
from specjax.cli.datastore import DatastoreCommand
from specjax.cli.environment import quiet
from specjax.cli.generate import Generate
from specjax.cli.help import command_help, flags_of, overview
from specjax.cli.methods import Methods
from specjax.cli.options import union_of
from specjax.cli.report import ReportCommand
from specjax.cli.reproduce import reproduce_command
from specjax.cli.train import Train, train_commands
from specjax.cli.tune import TUNE_COMMANDS, Tune
from specjax.core.errors import SpecjaxError, exit_code
from specjax.core.interrupts import Stopped

DESCRIPTION = """Lossless speculative decoding for Llama-family models: plain decoding's text, in
less time. Start with `specjax generate --compare`."""
COMPLETION = "--tyro-write-completion"
NOTES = f"""`specjax --version` prints the version.

To complete commands and options with Tab, let your shell read FILE after this
(bash, zsh, fish or tcsh):

  specjax {COMPLETION} bash FILE   # then `source FILE`"""

COMMANDS: dict[str, type] = {
    "generate": Generate,
    "chat": Chat,
    "bench": BenchCommand,
    "report": ReportCommand,
    "reproduce": reproduce_command(),
    "train": Train,
    "tune": Tune,
    "datastore": DatastoreCommand,
    "attribute": Attribute,
    "convert": Convert,
    "methods": Methods,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, by default that of the process, and returns the exit code."""
    return exit_code(partial(_run, list(sys.argv[1:] if arguments is None else arguments)))


def _run(arguments: list[str]) -> None:
    arguments = [_utf8(argument) for argument in arguments]
    quiet()
    if arguments == ["--version"]:
        print("specjax", __version__)
    elif not arguments or {"-h", "--help"} & set(arguments):
        print(_help(arguments))
    else:
        command = parsed(arguments)
        from specjax.core.memory import explain_out_of_memory

        try:
            with explain_out_of_memory():
                command.run()
        except Stopped as stopped:
            if not (advice := getattr(command, "if_stopped", "")):
                raise
            raise Stopped(stopped.number, f"{str(stopped) or 'stopped'}; {advice}") from None


def parsed(arguments: Sequence[str]) -> Any:
    """Returns the command of a command line; its `run` does the work.

    Raises:
        SpecjaxError: if the arguments do not parse.
    """
    # The subcommands of `train` come from the registry, which imports JAX.
    training = list(arguments[:1]) in (["train"], [COMPLETION])
    trains = Train[union_of(train_commands()) if training else None]
    said = StringIO()
    try:
        with redirect_stderr(said):
            return tyro.cli(
                union_of({**COMMANDS, "train": trains}),
                prog="specjax",
                args=list(arguments),
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as stop:
        if not stop.code:  # the completion is written
            raise
    raise SpecjaxError(_complaint(arguments, said.getvalue()))


def _complaint(arguments: Sequence[str], box: str) -> str:
    """Returns in one line what does not parse, from the arguments and the parser's box of text."""
    words, command, choices = _command_of(arguments)
    more = f"`{words} --help` shows what there is"
    if choices is not None:
        given = arguments[len(words.split()) - 1 :]
        if not given:
            return f"`{words}` needs one of {', '.join(choices)}; {more}"
        return f"`{words}` has no {given[0]!r}; {_similar(given[0], choices)}{more}"
    flags = flags_of(command)
    for argument in arguments:
        flag = argument.partition("=")[0].replace("_", "-")
        if flag.startswith("--") and " " not in flag and flag not in flags:
            return f"`{words}` has no option {flag}; {_similar(flag, flags)}{more}"
    said = " ".join(_first_lines(box)).rstrip(".")
    if said.startswith("Unrecognized"):
        said += "; a text with spaces needs quotes"
    return f"{said[:1].lower()}{said[1:]}; {more}"


def _similar(word: str, known: Iterable[str]) -> str:
    found = get_close_matches(word, known, 1, cutoff=0.75)
    return f"did you mean {found[0]}? " if found else ""


def _first_lines(box: str) -> list[str]:
    """Returns the first lines below the title of a box, without help that is indented deeper."""
    from rich.text import Text

    found: list[str] = []
    for line in Text.from_ansi(box).plain.splitlines()[1:]:
        line = line.strip("│╰╯")
        is_rule = not line.strip(" ─-")
        if is_rule and found:
            break
        if not is_rule and not line.startswith(" " * 8):
            found.append(line.strip())
    return found


def _command_of(arguments: Sequence[str]) -> tuple[str, Any, Mapping[str, type] | None]:
    """Returns the words and the class of the command that is meant, or else what there is."""
    name, what, *_ = [*arguments, "", ""]
    if name not in COMMANDS:
        return "specjax", None, COMMANDS
    words, command = f"specjax {name}", COMMANDS[name]
    if name not in ("train", "tune"):
        return words, command, None
    commands = train_commands() if name == "train" else TUNE_COMMANDS
    if what not in commands:
        return words, command, commands
    return f"{words} {what}", commands[what], None


def _help(arguments: Sequence[str]) -> str:
    """Returns the help that is asked for; for a command that does not exist, what there is."""
    words, command, choices = _command_of(arguments)
    if choices is COMMANDS:
        return overview(words, DESCRIPTION, "COMMAND", COMMANDS, NOTES)
    if choices is not None:
        return overview(words, command.__doc__ or "", "WHAT", choices, "")
    return command_help(words, command)


def _utf8(argument: str) -> str:
    """Reads an argument as UTF-8, whatever the locale is.

    Raises:
        SpecjaxError: if it is not.
    """
    try:
        return os.fsencode(argument).decode("utf-8")
    except UnicodeError:
        raise SpecjaxError(
            f"the argument {argument!a} is not UTF-8 text; convert it first, or give a file"
        ) from None
