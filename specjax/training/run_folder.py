"""The folder of a training run: checkpoints, metrics and provenance.

    config.json     all settings; a folder is resumed only under the same ones
    run.json        command line, revision and versions of each start
    metrics.jsonl   a line per logged step, and per measurement
    tensorboard/    the same for TensorBoard
    checkpoints/    the newest ones and the best one

A corrupt checkpoint is skipped for the one before.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
from jaxtyping import PyTree

from specjax.core.errors import SpecjaxError, warn
from specjax.core.files import check_writable, expand_user, read_json, writable
from specjax.core.folder import RunFolder, check_same_run
from specjax.core.provenance import revision, versions
from specjax.models.io.head_files import CHECKPOINTS
from specjax.training import checkpoints

METRICS, RUN = "metrics.jsonl", "run.json"
TENSORBOARD = "tensorboard"


@dataclass(frozen=True)
class TrainingRun:
    """Keeps checkpoints and metrics of a run; without a folder it keeps nothing.

    `manager` is Orbax's, `board` TensorBoard's. Each checkpoint holds `config` as well, because it
    may outlive the folder: those at a URL do, where a machine is lost with its disk. Of several
    processes the first alone has a board, and writes everything but the checkpoints.
    """

    folder: RunFolder | None = None
    manager: Any = None
    board: Any = None
    config: Mapping[str, Any] = field(default_factory=dict)

    def restored(self, state: PyTree, batches: Any) -> tuple[int, PyTree]:
        """Returns the newest intact checkpoint's step and state, or 0 and `state`.

        Moves `batches` to the position of that step.

        Raises:
            SpecjaxError: if there are checkpoints, but none can be read.
        """
        if self.folder is None:
            return 0, state
        corrupt: dict[int, SpecjaxError] = {}
        for step in sorted(self.manager.all_steps(), reverse=True):
            try:
                state, position = checkpoints.read(self.manager, step, state)
            except SpecjaxError as error:
                corrupt[step] = error
                continue
            if not (isinstance(position, dict) and "config" in position):  # of earlier versions
                position = {"batches": position, "config": self.config}
            check_same_run(self.manager.directory, position["config"], self.config)
            if position["batches"] is not None:
                batches.set_state(position["batches"])
            for each, reason in corrupt.items():  # new ones will take their places
                warn(f"Skipped corrupt checkpoint {each} ({reason}).")
                self.manager.delete(each)
            self._forget_after(step)
            return step, state
        if corrupt:
            reason = next(iter(corrupt.values()))
            raise SpecjaxError(
                f"no checkpoint in {self.folder.path} can be read ({reason}); delete that folder "
                "and train again"
            )
        self._forget_after(0)
        return 0, state

    def best(self, state: PyTree) -> tuple[int, float, PyTree] | None:
        """Returns step, score and state of the best intact checkpoint; None if there is none."""
        if self.folder is None:
            return None
        self.wait()
        for step, score in checkpoints.scores(self.manager).items():
            try:
                return step, score, checkpoints.read(self.manager, step, state)[0]
            except SpecjaxError as error:
                warn(f"Skipped corrupt checkpoint {step} ({error}).")
        return None

    def _forget_after(self, step: int) -> None:
        """Drops the metrics of steps that will run again, and an unfinished line."""
        if self.folder is None or self.board is None:
            return
        steps = list(self.folder.records(METRICS, lambda line: int(line["step"])))
        self.folder.truncate(METRICS, sum(logged <= step for logged in steps))
        if steps:
            self._hide_after(step)

    def _hide_after(self, step: int) -> None:
        """Has TensorBoard hide what earlier starts logged after this step."""
        from tensorboardX.proto import event_pb2

        event: Any = event_pb2  # pyright does not see the names that protobuf makes
        restart = event.SessionLog(status=event.SessionLog.START)
        self.board.file_writer.add_event(event.Event(step=step + 1, session_log=restart))

    def log(self, row: Mapping[str, Any]) -> None:
        """Appends a line to the metrics; a list holds one number per depth."""
        if self.folder is None or self.board is None:
            return
        self.folder.append(METRICS, row)
        for name, value in row.items():
            if isinstance(value, list):
                for depth, part in enumerate(value, start=1):
                    self.board.add_scalar(f"{name}/{depth}", part, row["step"])
            elif name != "step":
                self.board.add_scalar(name, value, row["step"])

    def save(self, step: int, state: PyTree, batches: Any, score: float | None) -> None:
        """Writes a checkpoint in the background."""
        if self.folder is not None:
            with _saving(self.manager):
                position = {"batches": batches.get_state(), "config": dict(self.config)}
                checkpoints.write(self.manager, step, state, position, score)

    def wait(self) -> None:
        """Waits until all checkpoints are written."""
        if self.folder is None:
            return
        with _saving(self.manager):
            self.manager.wait_until_finished()


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

    Raises:
        SpecjaxError: if the folder cannot be written, is in use, holds a run with another config,
            or holds any run while `resume` is false.
    """
    if folder is None:
        yield TrainingRun()
        return
    from tensorboardX import SummaryWriter

    run_folder = RunFolder(expand_user(folder).absolute())
    is_first = jax.process_index() == 0
    with run_folder.lock() if is_first else nullcontext():
        if is_first:
            run_folder.claim(config, resume)
            _add_start(run_folder)
        with (
            checkpoints.quiet(),
            _manager(place or str(run_folder.path / CHECKPOINTS), keep_last) as manager,
            SummaryWriter(str(run_folder.path / TENSORBOARD))
            if is_first
            else nullcontext() as board,
        ):
            run = TrainingRun(run_folder, manager, board, config)
            yield run
            run.wait()


def _manager(place: str, keep_last: int) -> Any:
    is_url = "://" in place
    folder = place if is_url else expand_user(place).absolute()
    try:
        return checkpoints.manager_of(folder, keep_last)
    except Exception as error:  # of the packages behind URLs, or because they are not installed
        advice = (
            "choose a folder, or install what writes there: gcsfs for gs://, s3fs for s3://"
            if is_url
            else "free some space, or choose another folder"
        )
        raise SpecjaxError(
            f"checkpoints cannot be kept in {place} ({checkpoints.reason_of(error)}); {advice}"
        ) from error


@contextmanager
def _saving(manager: Any) -> Iterator[None]:
    """Turns a failure to write a checkpoint, now or in the background, into a SpecjaxError."""
    try:
        yield
    except Exception as error:  # Orbax and TensorStore raise many kinds
        checkpoints.drop_unfinished(manager.directory)
        reason = checkpoints.reason_of(error)
        raise SpecjaxError(
            f"a checkpoint in {manager.directory} cannot be written ({reason}); free some space "
            "and go on from the last whole one with --resume, or choose another folder"
        ) from error


def check_out(out: Path, resume: bool, made: str) -> None:
    """Raises SpecjaxError if no run can start in `out`; called before anything slow.

    `made` is the name of the folder in it that the run makes.
    """
    folder = RunFolder(out)
    with writable(out):
        has_run, is_made = folder.has_run, (out / made).exists()
    check_writable(out)
    if is_made and not has_run:
        raise SpecjaxError(f"{out / made} already exists, but no run; give another folder")
    if out.is_dir():
        with folder.lock():  # nobody is in it
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
