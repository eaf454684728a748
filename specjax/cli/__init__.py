"""The command line: parse, call, print.

A command is a frozen dataclass: its fields are the options, its `run` does the work. Heavy imports
are inside `run`, so that help and errors in the options appear at once.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated

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
from specjax.cli.train import Train
from specjax.cli.tune import Tune
from specjax.core.errors import exit_code

DESCRIPTION = """Lossless speculative decoding for Llama-family models.

Start with `specjax generate --compare`. `specjax --version` prints the version."""

Command = (
    Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[BenchCommand, tyro.conf.subcommand("bench")]
    | Annotated[ReportCommand, tyro.conf.subcommand("report")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Tune, tyro.conf.subcommand("tune")]
    | Annotated[DatastoreCommand, tyro.conf.subcommand("datastore")]
    | Annotated[Attribute, tyro.conf.subcommand("attribute")]
    | Annotated[Convert, tyro.conf.subcommand("convert")]
    | Annotated[Methods, tyro.conf.subcommand("methods")]
)


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
        Command,  # pyright: ignore[reportArgumentType]  # a union of dataclasses is no class
        prog="specjax",
        description=DESCRIPTION,
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    quiet()
    command.run()
