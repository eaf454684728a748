"""The command line: parse, run, print."""

import gc
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
from specjax.cli.methods import Methods
from specjax.cli.parser import Commands, Group, parse
from specjax.cli.serve import Serve
from specjax.core.companions import companion
from specjax.core.errors import SpecjaxError, exit_code
from specjax.core.interrupts import Stopped

ABOUT = """Lossless speculative decoding for Llama-family models: the text of plain
decoding, faster. Start with `specjax generate --compare`.

`specjax COMMAND --help` shows the options of COMMAND. `specjax --version` prints the version.

To complete commands and options with Tab (in bash, zsh, fish or tcsh):

  specjax --tyro-write-completion bash FILE   # then `source FILE`"""

EXAMPLE = "specjax train {0} --data chats.jsonl --out runs/{0}"


def _train_commands() -> dict[str, type]:
    """Returns a command for every method with a head, and one for disco."""
    from specjax.cli.train_disco import TrainDisco
    from specjax.cli.train_heads import train_command
    from specjax.loading.methods import METHODS

    commands = {}
    for name, method in METHODS.items():
        if method.training:
            commands[name] = train_command(name, method.training, EXAMPLE.format(name))
        example = EXAMPLE.format(f"{name}-stage-1")
        for number, stage in enumerate(method.stages, 1):
            command = f"{name}-stage-{number}"
            commands[command] = train_command(name, stage, example)
            example = (
                f"specjax train {name}-stage-{number + 1} --start runs/{command} --out runs/{name}"
            )
    return {**commands, "disco": TrainDisco}


def _tune_commands() -> dict[str, type]:
    from specjax.cli.tune import TUNE_COMMANDS

    return TUNE_COMMANDS


TRAIN = Group("Train a drafter for a target; a stopped run can be resumed.", _train_commands)
TUNE = Group(
    "Find the best settings for a target; `generate` and `bench` then use them.", _tune_commands
)

GARBAGE = 100_000  # objects between collections, which otherwise take an eighth of the start-up

COMMANDS: Commands = {
    "generate": Generate,
    "chat": Chat,
    "serve": Serve,
    "bench": BenchCommand,
    "report": ReportCommand,
    "reproduce": companion("papers.command").Reproduce,
    "train": TRAIN,
    "tune": TUNE,
    "datastore": DatastoreCommand,
    "attribute": companion("papers.attribute").Attribute,
    "convert": Convert,
    "methods": Methods,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, by default that of the process, and returns the exit code."""
    return exit_code(partial(_run, sys.argv[1:] if arguments is None else arguments))


def _run(arguments: Sequence[str]) -> None:
    gc.set_threshold(GARBAGE)
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
