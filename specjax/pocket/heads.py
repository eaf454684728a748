"""How pocket's heads are trained, one after another: `python -m specjax.pocket.heads --out DIR`.

Each is a `specjax train` command, so this is also how to train a head for any target. As in HASS
(section 4.2), everything starts from one EAGLE head and goes on for the same number of steps: with
EAGLE's own loss, with the Top-K loss added, and with 2, 3 and 4 steps of harmonized context
alignment; the last learns from what the target writes itself. An interrupted run is resumed by the
same command.
"""

import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro

from specjax.errors import SpecjaxError, exit_code
from specjax.files import expand_user
from specjax.models.config import LlamaConfig
from specjax.models.heads.eagle_files import HEAD, load_eagle, read_about, save_eagle

COMMON = (
    *("--target", "pocket", "--data", "pocket"),
    *("--packing", "--longest", "512", "--batch-size", "8"),
    *("--decay", "cosine", "--clip", "norm", "--clip-at", "1.0", "--resume"),
)
TEXTS = ("--limit", "12000")
FIRST = (*TEXTS, "--num-steps", "1500", "--learning-rate", "6e-3", "--warmup", "0.04")
MORE = ("--num-steps", "500", "--learning-rate", "3e-3", "--warmup", "0.04", "--seed", "1")
DISTILLED = ("--distill", "--limit", "4000")


@dataclass(frozen=True)
class Recipe:
    """One `specjax train` command, and the run whose head it starts from."""

    method: str
    start: str | None
    settings: tuple[str, ...]

    def command(self, name: str, out: Path) -> list[str]:
        """The command line, for a run folder in `out`."""
        start = () if self.start is None else ("--start", str(out / self.start / "head"))
        arguments = (self.method, "--out", str(out / name), *COMMON, *self.settings, *start)
        return [sys.executable, "-m", "specjax", "train", *arguments]


RECIPES = {
    "eagle": Recipe("eagle", None, FIRST),
    "eagle-longer": Recipe("eagle", "eagle", (*MORE, *TEXTS)),
    "eagle-top-k": Recipe("hass", "eagle", (*MORE, *TEXTS, "--align-steps", "1")),
    "hass-2": Recipe("hass", "eagle", (*MORE, *TEXTS, "--align-steps", "2")),
    "hass-3": Recipe("hass", "eagle", (*MORE, *TEXTS, "--align-steps", "3")),
    "hass-4": Recipe("hass", "eagle", (*MORE, *TEXTS, "--align-steps", "4")),
    "hass-3-distilled": Recipe("hass", "eagle", (*MORE, *DISTILLED, "--align-steps", "3")),
}


SHIPPED = {"eagle": "eagle", "hass": "hass-3"}  # name in the package, run


@dataclass(frozen=True)
class Options:
    """Train pocket's heads, those that are not trained yet."""

    out: Path
    """A folder for the run folders, one of each name."""
    only: tuple[str, ...] = tuple(RECIPES)
    """The runs to make, in this order; by default all."""
    ship: Path | None = None
    """Also write the heads that come with the package into this folder, in 16 bits."""


def build(options: Options) -> None:
    """Runs the commands.

    Raises:
        SpecjaxError: for an unknown name, or when a command fails.
    """
    out = expand_user(options.out)
    for name in options.only:
        if name not in RECIPES:
            raise SpecjaxError(f"{name!r} is none of the heads; they are {', '.join(RECIPES)}")
    for name in options.only:
        command = RECIPES[name].command(name, out)
        print(name, *command[3:], flush=True)
        if subprocess.run(command, check=False).returncode:
            raise SpecjaxError(f"the run {name} stopped; its own message stands above")
    if options.ship is not None:
        for name, run in SHIPPED.items():
            ship(out / run / HEAD, expand_user(options.ship) / name)


def ship(head_folder: Path, folder: Path) -> None:
    """Writes a head as it comes with the package: half precision, without pocket's embedding.

    Raises:
        SpecjaxError: if there is no such head, or `folder` already holds something.
    """
    target = LlamaConfig.read(Path(__file__).parent / "weights" / "target")
    head, params = load_eagle(head_folder, target, "float32")
    about = read_about(head_folder)
    save_eagle(folder, head, params, "float16", target=target, about=about)


def main() -> int:
    """Command line: trains, and returns the exit code."""
    return exit_code(partial(build, tyro.cli(Options)))


if __name__ == "__main__":
    sys.exit(main())
