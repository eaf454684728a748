"""Trains the heads of a recipe, one after another: each run is a `specjax train` command.

The same command goes on where it was interrupted.
"""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, make_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import specjax
from benchmarks import harness
from specjax import SpecjaxError
from specjax.core.files import expand_user
from specjax.data.conversations import read_conversations
from specjax.loading.methods import METHODS
from specjax.loading.parts import load_head
from specjax.models.heads.layered import LayeredHead, with_draft_tokens
from specjax.models.io.head_files import HEAD, detect_format, read_about, save_head
from specjax.training import tokenize_all
from specjax.training.examples import frequent_tokens


@dataclass(frozen=True)
class Run:
    """One `specjax train` command."""

    method: str
    settings: tuple[str, ...]
    start: str | None = None  # the run whose head it starts from
    texts: str | None = None  # the run whose distilled texts it learns from; None: the recipe's


def lasting(num_steps: int, learning_rate: float, seed: int = 0) -> tuple[str, ...]:
    """Returns the settings of a run of this length."""
    return (
        *("--num-steps", str(num_steps), "--learning-rate", str(learning_rate)),
        *("--seed", str(seed)),
    )


@dataclass(frozen=True)
class Recipe:
    """The runs of one target, in the order in which they are made."""

    target: str | None  # by default; None: the command line names it
    runs: Mapping[str, Run]
    common: tuple[str, ...]  # settings of all runs
    shipped: Mapping[str, str]  # name of a head that is kept: its run
    dtype: str  # of the kept heads
    draft_vocab: int = 0  # of the kept heads that can have one; 0: all tokens
    keeps_states: bool = False  # whether runs share the target's hidden states

    @property
    def options(self) -> type:
        """The options of the command line."""
        fields = [
            ("target", str, self.target) if self.target else ("target", str),
            ("data", str),
            ("out", Path),
            ("only", tuple[str, ...], tuple(self.runs)),
            ("ship", Path | None, None),
        ]
        return make_dataclass("Options", fields, kw_only=True)


def main(recipe: Recipe) -> None:
    """Runs the command line of a recipe.

    `--out` is the folder for the run folders, which have the names of the runs, `--only` the runs
    to make, in this order, and `--ship` a folder into which the heads that are kept are written.
    """
    harness.main(partial(build, recipe), recipe.options, main.__doc__)


def build(recipe: Recipe, options: Any) -> None:
    """Runs the commands."""
    out = expand_user(options.out)
    harness.check_known("run", options.only, recipe.runs)
    for name in options.only:
        command = command_of(recipe, name, out, options.target, options.data)
        print(name, *command[3:], flush=True)
        if subprocess.run(command, check=False).returncode:
            raise SpecjaxError(f"run {name} failed; see its message above, then repeat the command")
    if options.ship is not None:
        for name, run in recipe.shipped.items():
            if run in options.only:
                folder = expand_user(options.ship) / name
                ship(recipe, out / run / HEAD, folder, options.target, options.data)


def command_of(recipe: Recipe, name: str, out: Path, target: str, data: str) -> list[str]:
    """Returns the command line of a run in the folder `out`."""
    run = recipe.runs[name]
    start = () if run.start is None else ("--start", str(out / run.start / HEAD))
    texts = data if run.texts is None else str(out / run.texts / "distilled.jsonl")
    named = ("--out", str(out / name), "--target", target, "--data", texts)
    if recipe.keeps_states:
        named += ("--hidden-states", str(out / "hidden-states"))
    command = (sys.executable, "-m", "specjax", "train", run.method)
    return [*command, *named, *recipe.common, *run.settings, *start]


def ship(recipe: Recipe, head_folder: Path, folder: Path, name: str, data: str) -> None:
    """Writes a head as it ships: in 16 bits, without the target's embedding."""
    target, format = specjax.load(name), detect_format(head_folder, METHODS.head_formats)
    head, params = load_head(head_folder, target, METHODS.head_formats, format, "float32")
    if recipe.draft_vocab and isinstance(head, LayeredHead) and not head.config.draft_vocab_size:
        longest = target.config.longest_text
        examples = tokenize_all(read_conversations([data]), target.require_tokenizer(), longest)
        tokens, _ = frequent_tokens(examples, target.config.vocab_size, recipe.draft_vocab)
        head, params = with_draft_tokens(head, params, tokens)
    about = read_about(head_folder)
    save_head(folder, format, head, params, recipe.dtype, target=target.config, about=about)
