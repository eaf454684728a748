"""The command line: parse, call, print.

A command is a frozen dataclass: its fields are the options, its `run` does the work. Heavy imports
are inside `run`, so that help and errors in the options appear at once.
"""

import sys
from collections.abc import Sequence
from functools import partial, reduce
from operator import or_
from typing import Annotated, Any

import tyro

from specjax import __version__
from specjax.cli.attribute import Attribute
from specjax.cli.bench import BenchCommand
from specjax.cli.convert import Convert
from specjax.cli.datastore import DatastoreCommand
from specjax.cli.environment import quiet
from specjax.cli.generate import Generate
from specjax.cli.methods import Methods
from specjax.cli.report import ReportCommand
from specjax.cli.train import Train, train_subcommands
from specjax.cli.tune import Tune
from specjax.core.errors import exit_code
from specjax.core.interrupts import Stopped

DESCRIPTION = """Lossless speculative decoding for Llama-family models.

Start with `specjax generate --compare`. `specjax --version` prints the version."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, by default that of the process, and returns the exit code.

    Raises:
        SystemExit: after printing help, or if the arguments do not parse.
    """
    return exit_code(partial(_run, list(sys.argv[1:] if arguments is None else arguments)))


def _run(arguments: list[str]) -> None:
    if arguments == ["--version"]:
        print("specjax", __version__)
        return
    command = tyro.cli(
        _commands(arguments),
        prog="specjax",
        description=DESCRIPTION,
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    quiet()
    try:
        command.run()
    except Stopped as stopped:
        if not (advice := getattr(command, "if_stopped", "")):
            raise
        raise Stopped(stopped.number, f"{str(stopped) or 'stopped'}; {advice}") from None


def _commands(arguments: list[str]) -> Any:
    """Returns the union of all commands.

    The subcommands of `train` come from the registry, which imports JAX; they are left out where
    nobody sees them.
    """
    commands = {
        "generate": Generate,
        "bench": BenchCommand,
        "report": ReportCommand,
        "train": Train[train_subcommands() if arguments[:1] == ["train"] else None],
        "tune": Tune,
        "datastore": DatastoreCommand,
        "attribute": Attribute,
        "convert": Convert,
        "methods": Methods,
    }
    return reduce(
        or_, (Annotated[kind, tyro.conf.subcommand(name)] for name, kind in commands.items())
    )
