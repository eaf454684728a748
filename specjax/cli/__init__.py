"""The command line: parse, call, print.

A command is a frozen dataclass whose fields are its options and whose `run` does the work. `run`
imports what it needs, so that help and mistyped options answer at once.
"""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from specjax import __version__
from specjax.cli.bench import Bench
from specjax.cli.convert import Convert
from specjax.cli.environment import quiet
from specjax.cli.generate import Generate
from specjax.cli.methods import Methods
from specjax.errors import SpecjaxError

DESCRIPTION = """Lossless speculative decoding for Llama-family models.

Start with `specjax generate --compare`; `specjax --version` tells the version."""
USER_ERROR, BROKEN_PIPE, INTERRUPTED = 2, 1, 130  # exit codes

Command = (
    Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Convert, tyro.conf.subcommand("convert")]
    | Annotated[Methods, tyro.conf.subcommand("methods")]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line, by default that of the process, and returns its exit code.

    Raises:
        SystemExit: after help, or for arguments that do not parse.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        try:
            _run(arguments)
        finally:
            sys.stdout.flush()
    except SpecjaxError as error:
        print("specjax:", " ".join(str(error).splitlines()), file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left; what Python flushes at exit must go somewhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return 0


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
