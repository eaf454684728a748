"""Trains pocket's heads, one after another: `python -m recipes.pocket.heads --out DIR`.

Each run is a `specjax train` command, which works for any target. As in HASS (section 4.2), all
runs of EAGLE and HASS start from one EAGLE head and take the same number of further steps: with
EAGLE's own loss, with the Top-K loss added, and with 2, 3 and 4 steps of harmonized context
alignment. ParallelSpec for EAGLE starts from that head as well, with new masks; Medusa, Hydra and
ParallelSpec for Medusa start from random params. The distilled runs continue on texts that the
target wrote itself. Medusa's four heads have LM heads of their own, as published; Hydra's are
larger and read the target's, to keep the package small. The same command resumes an interrupted
run.
"""

import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro

import specjax
from specjax import SpecjaxError
from specjax.core.errors import exit_code
from specjax.core.files import expand_user
from specjax.loading import load_head
from specjax.methods import HEAD_FORMATS
from specjax.models.io.head_files import HEAD, detect_format, read_about, save_head

COMMON = (
    *("--target", "pocket", "--packing", "--longest", "512", "--batch-size", "8"),
    *("--accumulate", "1", "--warmup", "0.04"),
    *("--decay", "cosine", "--clip", "norm", "--clip-at", "1.0", "--resume"),
)
TEXTS = ("--limit", "12000")
FIRST = (*TEXTS, "--num-steps", "1500", "--learning-rate", "6e-3")
MORE = ("--num-steps", "500", "--learning-rate", "3e-3", "--seed", "1")
ALIGNED = (*MORE, *TEXTS, "--align-steps")
DISTILLED = ("--distill", "--limit", "4000")
AFTER = ("--num-steps", "80", "--learning-rate", "2e-3", "--seed", "2")


@dataclass(frozen=True)
class Recipe:
    """One `specjax train` command."""

    method: str
    settings: tuple[str, ...]
    start: str | None = None  # the run whose head it starts from
    texts: str | None = None  # the run whose distilled texts it learns from; None: pocket's own

    def command(self, name: str, out: Path) -> list[str]:
        """Returns the command line of a run in the folder `out`."""
        start = () if self.start is None else ("--start", str(out / self.start / HEAD))
        data = "pocket" if self.texts is None else str(out / self.texts / "distilled.jsonl")
        arguments = (self.method, "--out", str(out / name), "--data", data, *COMMON)
        return [sys.executable, "-m", "specjax", "train", *arguments, *self.settings, *start]


def lasting(num_steps: int, learning_rate: float) -> tuple[str, ...]:
    """Returns the settings of a run of this length."""
    return ("--num-steps", str(num_steps), "--learning-rate", str(learning_rate))


def distilled(method: str, start: str, *settings: str) -> Recipe:
    """Returns a run that continues `start` on the texts that the target wrote for HASS."""
    return Recipe(method, (*AFTER, *settings), start, "hass-3-distilled")


RECIPES = {
    "eagle": Recipe("eagle", FIRST),
    "eagle-longer": Recipe("eagle", (*MORE, *TEXTS), "eagle"),
    "eagle-top-k": Recipe("hass", (*ALIGNED, "1"), "eagle"),
    "hass-2": Recipe("hass", (*ALIGNED, "2"), "eagle"),
    "hass-3": Recipe("hass", (*ALIGNED, "3"), "eagle"),
    "hass-4": Recipe("hass", (*ALIGNED, "4"), "eagle"),
    "hass-3-distilled": Recipe("hass", (*MORE, *DISTILLED, "--align-steps", "3"), "eagle"),
    "eagle-distilled": distilled("eagle", "eagle"),
    "medusa": Recipe("medusa", (*TEXTS, *lasting(1000, 2e-3), "--num-heads", "4")),
    "medusa-distilled": distilled("medusa", "medusa", "--num-heads", "4"),
    "hydra": Recipe("hydra", (*TEXTS, *lasting(400, 3e-3), "--no-lm-heads")),
    "hydra-distilled": distilled("hydra", "hydra", "--no-lm-heads"),
    "parallel-medusa": Recipe("parallel-medusa", (*TEXTS, *lasting(300, 6e-3))),
    "parallel-medusa-features": Recipe(
        "parallel-medusa", (*TEXTS, *lasting(200, 4e-3), "--features"), "eagle"
    ),
    "parallel-medusa-distilled": distilled("parallel-medusa", "parallel-medusa"),
    "parallel-eagle": Recipe("parallel-eagle", (*TEXTS, *lasting(500, 4e-3)), "eagle"),
    "parallel-eagle-distilled": distilled("parallel-eagle", "parallel-eagle"),
}


SHIPPED = {  # name in the package, run
    "eagle": "eagle",
    "hass": "hass-3",
    "medusa": "medusa",
    "hydra": "hydra",
    "parallel-medusa": "parallel-medusa",
    "parallel-eagle": "parallel-eagle",
}


@dataclass(frozen=True)
class Options:
    """Train those of pocket's heads that are not trained yet."""

    out: Path
    """The folder for the run folders, which have the names of the runs."""
    only: tuple[str, ...] = tuple(RECIPES)
    """The runs to make, in this order; by default all."""
    ship: Path | None = None
    """Also write the heads that come with the package into this folder, in 16 bits."""


def build(options: Options) -> None:
    """Runs the commands.

    Raises:
        SpecjaxError: for an unknown name, or if a command fails.
    """
    out = expand_user(options.out)
    for name in options.only:
        if name not in RECIPES:
            raise SpecjaxError(f"run {name!r} is unknown; choose from {', '.join(RECIPES)}")
    for name in options.only:
        command = RECIPES[name].command(name, out)
        print(name, *command[3:], flush=True)
        if subprocess.run(command, check=False).returncode:
            raise SpecjaxError(f"run {name} failed; see its message above, then repeat the command")
    if options.ship is not None:
        for name, run in SHIPPED.items():
            if run in options.only:
                ship(out / run / HEAD, expand_user(options.ship) / name)


def ship(head_folder: Path, folder: Path) -> None:
    """Writes a head as it comes with the package: in half precision, without pocket's embedding.

    Raises:
        SpecjaxError: if there is no such head, or `folder` already holds something.
    """
    target, format = specjax.load("pocket"), detect_format(head_folder, HEAD_FORMATS)
    head, params = load_head(head_folder, target, "float32", format)
    about = read_about(head_folder)
    save_head(folder, format, head, params, "float16", target=target.config, about=about)


def main() -> int:
    """Runs the command line; returns the exit code."""
    return exit_code(partial(build, tyro.cli(Options)))


if __name__ == "__main__":
    sys.exit(main())
