"""The folder of a training run: checkpoints, metrics and provenance.

    config.json     all settings; a folder is resumed only under the same ones
    run.json        command line, revision and versions of each start
    metrics.jsonl   a line per logged step, and per measurement
    tensorboard/    the same for TensorBoard
    checkpoints/    the newest ones and the best one

A corrupt checkpoint is skipped for the one before.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import time
from typing import Any, cast

import jax
from jaxtyping import PyTree

from specjax.core.errors import SpecjaxError, warn
from specjax.core.files import check_writable, expand_user, read_json, writable
from specjax.core.folder import RunFolder, check_same_run
from specjax.core.provenance import revision, versions
from specjax.models.io.head_files import CHECKPOINTS
from specjax.training.checkpoints import Checkpoints, quiet

METRICS, RUN, TENSORBOARD = "metrics.jsonl", "run.json", "tensorboard"


@dataclass(frozen=True)
class TrainingRun:
    """Keeps checkpoints and metrics of a run; without checkpoints it keeps nothing.

    Each checkpoint holds `config`, because at a URL it may outlive the folder. Of several processes
    only the first has a TensorBoard, and writes everything but the checkpoints.
    """

    folder: RunFolder = field(default_factory=lambda: RunFolder(Path()))
    checkpoints: Checkpoints | None = None
    tensorboard: "TensorBoard | None" = None
    config: Mapping[str, Any] = field(default_factory=dict)

    def restore(self, state: PyTree, batches: Any) -> tuple[int, PyTree]:
        """Returns step and state of the newest intact checkpoint, or 0 and `state`.

        Moves `batches` to that step, and deletes what later steps have left.
        """
        if self.checkpoints is None:
            return 0, state
        saved = self.checkpoints.steps()
        step, state, position = next(self._intact(saved, state), (0, state, None))
        if position is not None:
            check_same_run(self.checkpoints.place, position["config"], self.config)
            batches.set_state(position["batches"])
            for corrupt in saved[: saved.index(step)]:
                self.checkpoints.manager.delete(corrupt)
        elif saved:
            raise SpecjaxError(
                f"no checkpoint in {self.checkpoints.place} can be read; delete "
                f"{self.folder.path} and train again"
            )
        if self.tensorboard is not None:
            logged = list(self.folder.records(METRICS, lambda line: int(line["step"])))
            self.folder.truncate(METRICS, sum(number <= step for number in logged))
            if logged:
                self.tensorboard.hide_after(step)
        return step, state

    def best(self, state: PyTree) -> tuple[int, float, PyTree] | None:
        """Returns step, score and state of the best intact checkpoint; None if there is none."""
        if self.checkpoints is None:
            return None
        self.checkpoints.wait()
        scores = self.checkpoints.scores()
        best = next(self._intact(scores, state), None)
        return best and (best[0], scores[best[0]], best[1])

    def _intact(self, steps: Iterable[int], state: PyTree) -> Iterator[tuple[int, PyTree, Any]]:
        """Yields step, state and position of those checkpoints that can be read."""
        for step in steps:
            try:
                yield step, *cast(Checkpoints, self.checkpoints).read(step, state)
            except SpecjaxError as error:
                warn(f"skipped corrupt checkpoint {step} ({error})")

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Appends a line to the metrics; a list holds one number per depth."""
        if self.tensorboard is None:
            return
        self.folder.append(METRICS, metrics)
        for name, value in metrics.items():
            if isinstance(value, list):
                for depth, part in enumerate(value, start=1):
                    self.tensorboard.add_scalar(f"{name}/{depth}", part, metrics["step"])
            elif name != "step":
                self.tensorboard.add_scalar(name, value, metrics["step"])

    def save(self, step: int, state: PyTree, batches: Any, score: float | None) -> None:
        """Writes a checkpoint in the background."""
        if self.checkpoints is not None:
            position = {"batches": batches.get_state(), "config": dict(self.config)}
            self.checkpoints.write(step, state, position, score)

    def wait(self) -> None:
        """Waits until all checkpoints are written."""
        if self.checkpoints is not None:
            self.checkpoints.wait()


class TensorBoard:
    """Writes events for TensorBoard at once: their own thread would block a run on a full disk."""

    def __init__(self, folder: Path):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        self.folder = folder
        self.kinds: Any = event_pb2  # pyright does not see the names that protobuf makes
        with writable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self.events = EventsWriter(str(folder / "events"))

    def __enter__(self) -> "TensorBoard":
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        try:
            with writable(self.folder):
                self.events.close()
        except SpecjaxError:
            if kind is None:
                raise

    def add_scalar(self, name: str, value: float | int, step: int) -> None:
        """Adds a number of a step."""
        from tensorboardX.summary import scalar

        self._add(step=step, summary=scalar(name, value))

    def hide_after(self, step: int) -> None:
        """Makes TensorBoard hide what earlier starts logged after this step."""
        log = self.kinds.SessionLog
        self._add(step=step + 1, session_log=log(status=log.START))

    def _add(self, **fields: Any) -> None:
        with writable(self.folder):
            self.events.write_event(self.kinds.Event(wall_time=time(), **fields))
            self.events.flush()


@contextmanager
def open_run(
    folder: str | Path | None,
    config: Mapping[str, Any],
    resume: bool = True,
    keep_last: int = 2,
    place: str = "",
) -> Iterator[TrainingRun]:
    """Opens the run in `folder`, a new one or one to resume.

    `place`: the folder or URL of the checkpoints, if they are not in `folder`.
    """
    if folder is None:
        yield TrainingRun()
        return
    run_folder = RunFolder(expand_user(folder).absolute())
    path, is_first = run_folder.path, jax.process_index() == 0
    with run_folder.lock() if is_first else nullcontext():
        if is_first:
            run_folder.claim(config, resume)
            _add_start(run_folder)
        with (
            quiet(),
            Checkpoints(place or str(path / CHECKPOINTS), keep_last) as checkpoints,
            TensorBoard(path / TENSORBOARD) if is_first else nullcontext() as tensorboard,
        ):
            yield (run := TrainingRun(run_folder, checkpoints, tensorboard, config))
            run.wait()


def check_out(out: Path, resume: bool, result: str) -> None:
    """Raises SpecjaxError if no run can start in `out`; called before anything slow.

    `result` is the name of the folder in it that the run writes.
    """
    folder = RunFolder(out)
    with writable(out):
        others = [name for name in (result, RUN) if (out / name).exists() and not folder.has_run]
    check_writable(out)
    if others:
        raise SpecjaxError(f"{out} holds {others[0]}, but no training run; name another folder")
    if out.is_dir():
        with folder.lock():  # no other process uses it
            pass
    folder.check_resume(resume)


def _add_start(folder: RunFolder) -> None:
    """Adds this start to the list of starts of the run."""
    starts = read_json(folder.path / RUN)["starts"] if (folder.path / RUN).exists() else []
    start = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "revision": revision(),
        "versions": versions(),
        "devices": [str(device) for device in jax.devices()],
    }
    folder.write_json(RUN, {"starts": [*starts, start]})
