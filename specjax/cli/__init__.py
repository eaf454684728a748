"""The command line: parse, call, print.

A command is a frozen dataclass: its fields are the options, its `run` does the work. Heavy imports
are inside `run`, so that help and errors in the options appear at once.
"""

import os
import sys
from collections.abc import Sequence
from functools import partial
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
from specjax.cli.help import command_help, overview
from specjax.cli.methods import Methods
from specjax.cli.options import union_of
from specjax.cli.report import ReportCommand
from specjax.cli.reproduce import Reproduce
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
    "reproduce": Reproduce,
    "train": Train,
    "tune": Tune,
    "datastore": DatastoreCommand,
    "attribute": Attribute,
    "convert": Convert,
    "methods": Methods,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, by default that of the process, and returns the exit code.

    Raises:
        SystemExit: if the arguments do not parse.
    """
    return exit_code(partial(_run, list(sys.argv[1:] if arguments is None else arguments)))


def _run(arguments: list[str]) -> None:
    arguments = [_utf8(argument) for argument in arguments]
    quiet()
    if arguments == ["--version"]:
        print("specjax", __version__)
    elif {"-h", "--help"} & set(arguments):
        print(_help(arguments))
    else:
        command = parsed(arguments)
        from specjax.core.memory import told_if_exhausted

        try:
            with told_if_exhausted():
                command.run()
        except Stopped as stopped:
            if not (advice := getattr(command, "if_stopped", "")):
                raise
            raise Stopped(stopped.number, f"{str(stopped) or 'stopped'}; {advice}") from None


def parsed(arguments: Sequence[str]) -> Any:
    """Returns the command of a command line; its `run` does the work.

    Raises:
        SystemExit: if the arguments do not parse.
    """
    # The subcommands of `train` come from the registry, which imports JAX.
    training = list(arguments[:1]) in (["train"], [COMPLETION])
    trains = Train[union_of(train_commands()) if training else None]
    return tyro.cli(
        union_of({**COMMANDS, "train": trains}),
        prog="specjax",
        args=list(arguments),
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def _help(arguments: Sequence[str]) -> str:
    """Returns the help that is asked for; for a command that does not exist, what there is."""
    name, what, *_ = [*arguments, "", ""]
    if name not in COMMANDS:
        return overview("specjax", DESCRIPTION, "COMMAND", COMMANDS, NOTES)
    words, command = f"specjax {name}", COMMANDS[name]
    if name in ("train", "tune"):
        commands = train_commands() if name == "train" else TUNE_COMMANDS
        if what not in commands:
            return overview(words, command.__doc__ or "", "WHAT", commands, "")
        words, command = f"{words} {what}", commands[what]
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
