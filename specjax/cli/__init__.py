"""The command line: parse, run, print."""

import os
import sys
from collections.abc import Sequence
from functools import partial

from specjax import __version__
from specjax.cli.bench import BenchCommand, ReportCommand
from specjax.cli.chat import Chat
from specjax.cli.convert import Convert
from specjax.cli.datastore import DatastoreCommand
from specjax.cli.environment import quiet
from specjax.cli.generate import Generate
from specjax.cli.groups import TRAIN, TUNE
from specjax.cli.methods import Methods
from specjax.cli.papers import papers_command
from specjax.cli.parser import Commands, parse
from specjax.core.errors import SpecjaxError, exit_code
from specjax.core.interrupts import Stopped

ABOUT = """Lossless speculative decoding for Llama-family models: the text of plain
decoding, faster. Start with `specjax generate --compare`.

`specjax COMMAND --help` shows the options of COMMAND. `specjax --version` prints the version.

To complete commands and options with Tab (in bash, zsh, fish or tcsh):

  specjax --tyro-write-completion bash FILE   # then `source FILE`"""

COMMANDS: Commands = {
    "generate": Generate,
    "chat": Chat,
    "bench": BenchCommand,
    "report": ReportCommand,
    "reproduce": papers_command("command", "Reproduce"),
    "train": TRAIN,
    "tune": TUNE,
    "datastore": DatastoreCommand,
    "attribute": papers_command("attribute", "Attribute"),
    "convert": Convert,
    "methods": Methods,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, by default that of the process, and returns the exit code."""
    return exit_code(partial(_run, sys.argv[1:] if arguments is None else arguments))


def _run(arguments: Sequence[str]) -> None:
    quiet()
    if list(arguments) == ["--version"]:
        from specjax.models.native import description

        print("specjax", __version__)
        print("products on a CPU:", description())
        return
    try:
        command = parse([_utf8(argument) for argument in arguments] or ["--help"], COMMANDS, ABOUT)
    except SystemExit as ended:
        if ended.code:
            raise
        return  # help or a completion script is written
    from specjax.core.memory import explain_out_of_memory

    try:
        with explain_out_of_memory():
            command.run()
    except Stopped as stopped:
        if not (advice := getattr(command, "if_stopped", "")):
            raise
        raise Stopped(stopped.number, f"{str(stopped) or 'stopped'}; {advice}") from None


def _utf8(argument: str) -> str:
    """Reads an argument as UTF-8, whatever the locale is."""
    try:
        return os.fsencode(argument).decode("utf-8")
    except UnicodeError:
        raise SpecjaxError(
            f"the argument {argument!a} is not UTF-8 text; convert it first, or pass a file"
        ) from None
