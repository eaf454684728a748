"""How many masks a ParallelSpec head should have: `python -m specjax.bench.group_size --out DIR`.

ParallelSpec, section 5.3 and figure 4: for every K a head is trained anew, with `specjax train`,
and measured beside the others on the same prompts: accepted length and speed over K, as a table and
as a plot. All draft with the dynamic tree, of the same number of nodes: the static ones are as deep
as K = 4 allows. Each training is by default as long as the paper's, 40 epochs (of parallel-medusa
20); `--train="--num-steps 500"` shortens it. An interrupted run goes on where it stopped.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console

from specjax.bench.heads import HeadSource, contestants_of, speed_table
from specjax.bench.heads import Options as HeadsOptions
from specjax.bench.measure import Request
from specjax.bench.run import compare
from specjax.bench.summary import ALL, Measurement
from specjax.bench.tasks import read_tasks, token_ids
from specjax.core.errors import SpecjaxError, exit_code
from specjax.core.files import expand_user, writable, writable_folder
from specjax.decoding.request import check_length
from specjax.decoding.sampling import Sampling
from specjax.hub import POCKET, LoadedTarget, load
from specjax.methods import check_settings


@dataclass(frozen=True)
class Options:
    """How many masks should a head have?"""

    out: Path
    """A folder for the run folders, the table and the plot."""
    masks: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    """The K to compare."""
    method: Literal["parallel-eagle", "parallel-medusa"] = "parallel-eagle"
    """The method to train for."""
    target: str = POCKET
    """The model: pocket, a folder in Hugging Face format, or a hub id."""
    train: str = ""
    """More flags of `specjax train METHOD`, as one text: --train="--num-steps 500 --packing"."""
    tasks: str = POCKET
    """pocket for edits and completions of its held-out code, or a JSONL file."""
    limit: int = 4
    """Prompts of each kind of task."""
    max_new_tokens: int = 128
    """Stop after so many new tokens, if the text has not ended before."""
    num_tokens: int = 26
    """Nodes of each tree, root included."""
    temperature: float = 0.0
    """0 takes the most likely token; above, tokens are drawn."""
    runs: int = 3
    """How often each head runs each prompt."""


def train(options: Options, num_masks: int) -> Path:
    """The run folder of a head, which is trained if it is not yet.

    Raises:
        SpecjaxError: when the training fails.
    """
    out = expand_user(options.out) / f"masks-{num_masks}"
    told = ("--target", options.target, "--out", str(out), "--num-masks", str(num_masks))
    command = [sys.executable, "-m", "specjax", "train", options.method]
    command += [*shlex.split(options.train), *told, "--resume"]  # the last of equal flags counts
    if subprocess.run(command, check=False).returncode:
        raise SpecjaxError(f"the run {out} stopped; its own message stands above")
    return out


def measure(
    options: Options, target: LoadedTarget, requests: Sequence[Request], runs: Mapping[int, Path]
) -> list[Measurement]:
    """Plain decoding and every head, in turn on the same prompts."""
    heads = {
        name_of(num_masks): HeadSource(options.method, str(run), tree_of(options))
        for num_masks, run in runs.items()
    }
    asked = HeadsOptions(max_new_tokens=options.max_new_tokens)
    contestants = contestants_of(target, heads, asked, options.temperature, requests)
    return compare(contestants, requests, options.runs)


def tree_of(options: Options) -> dict[str, Any]:
    """The settings of all drafters."""
    return {"tree": "dynamic", "num_tokens": options.num_tokens}


def name_of(num_masks: int) -> str:
    """How a head is called in the table."""
    return f"K={num_masks}"


def draw(rows: Sequence[Measurement], masks: Sequence[int], path: Path) -> None:
    """Accepted length and speed over K, as a PNG."""
    from matplotlib.figure import Figure

    found = {row.method: row for row in rows if row.task == last_task(rows)}
    of_heads = [found[name_of(num_masks)] for num_masks in masks]
    figure = Figure(figsize=(6, 4), layout="constrained")
    lengths = figure.add_subplot()
    lengths.plot(masks, [row.mean_accepted_length for row in of_heads], "o-", label="length")
    lengths.set(xlabel="masks (K)", ylabel="accepted length", xticks=list(masks))
    speeds = lengths.twinx()
    speeds.plot(masks, [row.ratio for row in of_heads], "s--", color="C1", label="speed")
    speeds.set(ylabel="x plain")
    lengths.legend(loc="upper left")
    speeds.legend(loc="lower right")
    with writable(path):
        figure.savefig(path, dpi=120)


def last_task(rows: Sequence[Measurement]) -> str:
    """All kinds of task together, or the only one."""
    return ALL if any(row.task == ALL for row in rows) else rows[-1].task


def check(options: Options) -> tuple[LoadedTarget, list[Request]]:
    """The target and the prompts to measure on: what is wrong is told before the long training.

    Raises:
        SpecjaxError: for anything that training and measuring would stop at later.
    """
    if not options.masks or min(options.masks) < 1 or len(set(options.masks)) < len(options.masks):
        raise SpecjaxError("masks must be different numbers from 1 on; give --masks 1 2 4")
    if min(options.limit, options.runs, options.max_new_tokens) < 1:
        raise SpecjaxError("limit, runs and max_new_tokens must be at least 1")
    if find_spec("matplotlib") is None:
        raise SpecjaxError("the plot needs matplotlib; run `pip install matplotlib`")
    try:
        shlex.split(options.train)
    except ValueError as error:
        raise SpecjaxError(f"--train {options.train!r} cannot be read: {error}") from None
    Sampling(options.temperature)
    check_settings(options.method, tree_of(options))
    writable_folder(options.out)
    tasks = read_tasks(options.tasks, options.limit)
    target = load(options.target)
    tokenizer = target.require_tokenizer()
    requests = [Request(task.kind, token_ids(task, tokenizer)) for task in tasks]
    longest = max(len(request.ids) for request in requests)
    check_length(longest, options.max_new_tokens, target.config)
    return target, requests


def _run(options: Options) -> None:
    target, requests = check(options)
    runs = {num_masks: train(options, num_masks) for num_masks in options.masks}
    rows = measure(options, target, requests, runs)
    Console(soft_wrap=True, width=150).print(speed_table(rows, options.temperature))
    out = expand_user(options.out)
    found = [
        {"method": row.method, "accepted_length": row.mean_accepted_length, "ratio": row.ratio}
        for row in rows
        if row.task == last_task(rows)
    ]
    with writable(out):
        (out / "group-size.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    draw(rows, options.masks, out / "group-size.png")
    print(f"written to {out / 'group-size.json'} and {out / 'group-size.png'}")


if __name__ == "__main__":
    sys.exit(exit_code(partial(_run, tyro.cli(Options, description=__doc__))))
