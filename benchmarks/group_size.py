"""Compares numbers of masks of a ParallelSpec head: python -m benchmarks.group_size DIR

ParallelSpec, section 5.3 and figure 4: for every K a head is trained with `specjax train` and then
measured beside the others on the same prompts. All draft with the dynamic tree, of the same number
of nodes: the static ones are only as deep as K = 4 allows. Each training is by default as long as
the paper's; --train="--num-steps 500" shortens it. An interrupted run resumes.
"""

import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.harness import TARGET, TASKS, main, option
from specjax import load
from specjax.bench import run as bench
from specjax.bench.options import BenchOptions
from specjax.bench.report.tables import depth_table
from specjax.bench.report.terminal import print_grid
from specjax.bench.summary import last_task_rows
from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user, writable_folder
from specjax.loading.methods import check_settings
from specjax.loading.targets import POCKET, LoadedTarget
from specjax.run.tasks import read_tasks


@dataclass(frozen=True)
class GroupSizeOptions:
    """The options of this benchmark."""

    out: Path = option("folder for the runs of `specjax train`", kind=Path)
    masks: tuple[int, ...] = option("the K to compare", (1, 2, 3, 4, 5, 6), int)
    method: str = option("parallel-eagle or parallel-medusa", "parallel-eagle")
    target: str = option(TARGET, POCKET)
    train: str = option("more flags of `specjax train METHOD`, as one text", "")
    tasks: str = option(TASKS, POCKET)
    limit: int = option("prompts of each kind of task", 4)
    max_new_tokens: int = option("new tokens per prompt at most", 128)
    num_tokens: int = option("nodes of each tree, root included", 26)
    temperature: float = option("0 is greedy; above 0, tokens are sampled", 0.0)
    runs: int = option("how often each head runs each prompt", 3)

    @property
    def tree(self) -> dict[str, str | int]:
        """The settings of all drafters."""
        return {"tree": "dynamic", "num_tokens": self.num_tokens}

    @property
    def measured(self) -> BenchOptions:
        """The options of `specjax bench`, without the heads."""
        names = [f"K{number}" for number in self.masks]
        tree = [f"{setting}={value}" for setting, value in self.tree.items()]
        return BenchOptions(
            methods=",".join(f"{name}={self.method}" for name in names),
            set=tuple(f"{name}.{setting}" for name in names for setting in tree),
            tasks=self.tasks,
            limit=self.limit,
            max_new_tokens=self.max_new_tokens,
            temperature=str(self.temperature),
            runs=self.runs,
        )


def train(options: GroupSizeOptions, num_masks: int) -> Path:
    """Trains a head if it is not trained yet, and returns its folder.

    Raises:
        SpecjaxError: when the training fails.
    """
    out = expand_user(options.out) / f"masks-{num_masks}"
    flags = ("--target", options.target, "--out", str(out), "--num-masks", str(num_masks))
    command = [sys.executable, "-m", "specjax", "train", options.method]
    command += [*shlex.split(options.train), *flags, "--resume"]  # the last of equal flags counts
    if subprocess.run(command, check=False).returncode:
        raise SpecjaxError(f"the run {out} stopped; its own message is above")
    return out


def check(options: GroupSizeOptions) -> LoadedTarget:
    """Checks everything before the long training, and returns the target.

    Raises:
        SpecjaxError: for anything that training and measuring would stop at later.
    """
    if not options.masks or min(options.masks) < 1 or len(set(options.masks)) < len(options.masks):
        raise SpecjaxError("masks must be different numbers from 1 on; give --masks 1 2 4")
    try:
        shlex.split(options.train)
    except ValueError as error:
        raise SpecjaxError(f"--train {options.train!r} cannot be read: {error}") from None
    check_settings(options.method, options.tree)
    bench.check(options.measured)
    writable_folder(options.out)
    read_tasks(options.tasks, options.limit)
    return load(options.target)


def run(options: GroupSizeOptions) -> None:
    """Trains, measures and prints the tables."""
    target = check(options)
    heads = tuple(f"K{number}={train(options, number)}" for number in options.masks)
    rows = bench.run_bench(lambda: target, replace(options.measured, drafter=heads))
    print_grid(depth_table(last_task_rows(rows)))


if __name__ == "__main__":
    main(run, GroupSizeOptions, __doc__)
