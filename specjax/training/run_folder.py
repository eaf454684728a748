"""The folder of a training run: checkpoints, metrics, and all that tells what the run was.

    config.json     what decides the run; a folder is resumed only under the same one
    run.json        command line, revision and versions, of each start
    metrics.jsonl   a line per logged step, and per measurement
    tensorboard/    the same, to look at
    checkpoints/    Orbax's: the newest ones and the best one

A checkpoint is written beside the training and appears under its name when it is whole. It carries
a checksum: one that was damaged later is passed over for the one before.
"""

import json
import platform
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from specjax.errors import SpecjaxError
from specjax.files import expand_user, read_json, readable, writable

CHECKPOINTS, METRICS, CONFIG, RUN = "checkpoints", "metrics.jsonl", "config.json", "run.json"
TENSORBOARD = "tensorboard"
STATE, POSITION = "state", "position"  # the items of a checkpoint
VERSIONS = ("specjax", "jax", "flax", "optax", "orbax-checkpoint", "grain")


@dataclass(frozen=True)
class Run:
    """What a run keeps; nothing without a folder. `manager` is Orbax's, `board` TensorBoard's."""

    folder: Path | None = None
    manager: Any = None
    board: Any = None

    def restored(self, state: PyTree, batches: Any) -> tuple[int, PyTree]:
        """The newest whole checkpoint and its step, or 0 and `state`; moves `batches` there.

        Raises:
            SpecjaxError: if there are checkpoints, but none can be read.
        """
        if self.folder is None:
            return 0, state
        steps = sorted(self.manager.all_steps(), reverse=True)
        reasons = []
        for step in steps:
            try:
                state, position = self._read(step, state)
            except Exception as error:  # Orbax and TensorStore raise many kinds
                reasons.append((str(error).splitlines() or [type(error).__name__])[0])
                continue
            if position["data"] is not None:
                batches.set_state(position["data"])
            for damaged in steps[: len(reasons)]:  # they would stand in the way of new ones
                print(f"specjax: checkpoint {damaged} is damaged; left out", file=sys.stderr)
                self.manager.delete(damaged)
            self._forget_after(step)
            return step, state
        if steps:
            raise SpecjaxError(
                f"no checkpoint in {self.folder} can be read ({reasons[0]}); delete that folder "
                "and train again"
            )
        self._forget_after(0)
        return 0, state

    def best(self, state: PyTree) -> tuple[int, float, PyTree] | None:
        """Step, score and state of the checkpoint with the highest score; None without one."""
        if self.folder is None:
            return None
        self.manager.wait_until_finished()
        scores = {step: self.manager.metrics(step) for step in self.manager.all_steps()}
        known = {step: metrics["score"] for step, metrics in scores.items() if metrics}
        if not known:
            return None
        step = max(known, key=lambda step: known[step])
        return step, known[step], self._read(step, state)[0]

    def _read(self, step: int, state: PyTree) -> tuple[PyTree, dict[str, Any]]:
        import orbax.checkpoint as ocp

        items = {STATE: ocp.args.StandardRestore(state), POSITION: ocp.args.JsonRestore()}
        found = self.manager.restore(step, args=ocp.args.Composite(**items))
        if found[POSITION]["checksum"] != checksum(found[STATE]):
            raise SpecjaxError(f"checkpoint {step} has not the checksum that it was saved with")
        return found[STATE], found[POSITION]

    def _forget_after(self, step: int) -> None:
        """Drops the metrics of steps that will be run again, and a line cut short."""
        assert self.folder is not None
        file = self.folder / METRICS
        with readable(file), writable(file):
            lines = file.read_bytes().splitlines(True) if file.exists() else []
            whole = [line for line in lines if line.endswith(b"\n")]
            try:
                kept = [line for line in whole if json.loads(line)["step"] <= step]
            except (ValueError, KeyError, TypeError):
                raise SpecjaxError(
                    f"{file} is damaged; delete {self.folder} and train again"
                ) from None
            file.write_bytes(b"".join(kept))

    def log(self, row: Mapping[str, Any]) -> None:
        """Appends one line to the metrics; a list holds one number per depth."""
        if self.folder is None:
            return
        file = self.folder / METRICS
        with writable(file), file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
        for name, value in row.items():
            if isinstance(value, list):
                for depth, part in enumerate(value, start=1):
                    self.board.add_scalar(f"{name}/{depth}", part, row["step"])
            elif name != "step":
                self.board.add_scalar(name, value, row["step"])

    def save(self, step: int, state: PyTree, batches: Any, score: float | None) -> None:
        """Starts to write a checkpoint, and returns while that goes on."""
        if self.folder is None:
            return
        import orbax.checkpoint as ocp

        state = jax.tree.map(jnp.copy, state)  # the next step gives these arrays away
        position = {"data": batches.get_state(), "checksum": checksum(state)}
        items = {STATE: ocp.args.StandardSave(state), POSITION: ocp.args.JsonSave(position)}
        metrics = None if score is None else {"score": score}
        with writable(self.folder):
            self.manager.save(step, args=ocp.args.Composite(**items), metrics=metrics)


@contextmanager
def open_run(
    folder: str | Path | None, config: Mapping[str, Any], resume: bool = True, keep_last: int = 2
) -> Iterator[Run]:
    """The run in `folder`, new or to be resumed.

    Raises:
        SpecjaxError: if the folder cannot be written, or holds a run with another config, or any
            run if it is not to be resumed.
    """
    if folder is None:
        yield Run()
        return
    import orbax.checkpoint as ocp
    from tensorboardX import SummaryWriter

    policies = ocp.checkpoint_managers
    folder = expand_user(folder).absolute()
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        claim(folder / CONFIG, json.loads(json.dumps(config)), resume)
        _introduce(folder / RUN)
    options = ocp.CheckpointManagerOptions(
        best_fn=lambda metrics: metrics["score"],
        preservation_policy=policies.AnyPreservationPolicy(
            [
                policies.LatestN(keep_last),
                policies.BestN(
                    get_metric_fn=lambda metrics: metrics["score"],
                    n=1,
                    keep_checkpoints_without_metrics=False,
                ),
            ]
        ),
    )
    with (
        ocp.CheckpointManager(folder / CHECKPOINTS, options=options) as manager,
        SummaryWriter(str(folder / TENSORBOARD)) as board,
    ):
        yield Run(folder, manager, board)
        with writable(folder):
            manager.wait_until_finished()


def checksum(state: PyTree) -> int:
    """Of all arrays, in their order."""
    total = 0
    for leaf in jax.tree.leaves(state):
        total = zlib.crc32(np.ascontiguousarray(jax.device_get(leaf)).view(np.uint8).ravel(), total)
    return total


def check_vacant(folder: Path) -> None:
    """Raises SpecjaxError if `folder` holds a run: before anything that takes long."""
    if (folder / CONFIG).exists():
        raise SpecjaxError(
            f"{folder} already holds a run; add --resume to go on with it, or give another folder"
        )


def claim(file: Path, config: dict[str, Any], resume: bool) -> None:
    """Writes the config of a new run, or compares it with that of the run to go on with."""
    if not file.exists():
        file.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        return
    if not resume:
        check_vacant(file.parent)
    if (found := read_json(file)) != config:
        differing = [name for name in found | config if found.get(name) != config.get(name)]
        raise SpecjaxError(
            f"{file.parent} holds a run with other settings ({', '.join(differing)}); give another "
            "folder, or delete it"
        )


def _introduce(file: Path) -> None:
    """Adds this start to the list of those that made the run."""
    starts = read_json(file)["starts"] if file.exists() else []
    start = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "revision": _revision(),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in VERSIONS},
        "devices": [str(device) for device in jax.devices()],
    }
    file.write_text(json.dumps({"starts": [*starts, start]}, indent=1) + "\n", encoding="utf-8")


def _revision() -> str | None:
    """The commit of the source tree that this is, if it is one; changed files are told."""

    def git(*arguments: str) -> str:
        here = Path(__file__)
        return subprocess.run(
            ["git", *arguments], cwd=here.parent, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # not somebody else's repository
        return git("describe", "--always", "--dirty", "--abbrev=40")
    except (OSError, subprocess.CalledProcessError):
        return None
