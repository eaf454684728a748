"""The folder of a training run: checkpoints, metrics, and all that tells what the run was.

    config.json     what decides the run; a folder is resumed only under the same one
    run.json        command line, revision and versions, of each start
    metrics.jsonl   a line per logged step, and per measurement
    tensorboard/    the same, to look at
    checkpoints/    the newest ones and the best one

A checkpoint that was damaged is passed over for the one before.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
from jaxtyping import PyTree

from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user, read_json, readable, writable
from specjax.core.provenance import revision, versions
from specjax.models.io.checkpoint import CHECKPOINTS
from specjax.training import checkpoints

METRICS, CONFIG, RUN = "metrics.jsonl", "config.json", "run.json"
TENSORBOARD = "tensorboard"


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
        damaged, reason = [], None
        for step in sorted(self.manager.all_steps(), reverse=True):
            try:
                state, position = checkpoints.read(self.manager, step, state)
            except SpecjaxError as error:
                damaged, reason = [*damaged, step], reason or error
                continue
            if position is not None:
                batches.set_state(position)
            for each in damaged:  # they would stand in the way of new ones
                print(f"specjax: checkpoint {each} is damaged; left out", file=sys.stderr)
                self.manager.delete(each)
            self._forget_after(step)
            return step, state
        if damaged:
            raise SpecjaxError(
                f"no checkpoint in {self.folder} can be read ({reason}); delete that folder "
                "and train again"
            )
        self._forget_after(0)
        return 0, state

    def best(self, state: PyTree) -> tuple[int, float, PyTree] | None:
        """Step, score and state of the whole checkpoint with the highest score; None without."""
        if self.folder is None:
            return None
        self._wait()
        for step, score in checkpoints.scores(self.manager).items():
            try:
                return step, score, checkpoints.read(self.manager, step, state)[0]
            except SpecjaxError:
                print(f"specjax: checkpoint {step} is damaged; left out", file=sys.stderr)
        return None

    def _forget_after(self, step: int) -> None:
        """Drops the metrics of steps that will be run again, and a line cut short."""
        assert self.folder is not None
        file = self.folder / METRICS
        lines = whole_lines(file)
        try:
            kept = [line for line in lines if json.loads(line)["step"] <= step]
        except (ValueError, KeyError, TypeError):
            raise SpecjaxError(f"{file} is damaged; delete {self.folder} and train again") from None
        keep_lines(file, kept)
        if lines:
            self._hide_after(step)

    def _hide_after(self, step: int) -> None:
        """Tells TensorBoard that what earlier starts have beyond this step does not count."""
        from tensorboardX.proto import event_pb2

        event: Any = event_pb2  # made by protobuf, whose names pyright does not see
        restart = event.SessionLog(status=event.SessionLog.START)
        self.board.file_writer.add_event(event.Event(step=step + 1, session_log=restart))

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
        if self.folder is not None:
            with _saving(self.folder):
                checkpoints.write(self.manager, step, state, batches.get_state(), score)

    def _wait(self) -> None:
        """Until all checkpoints are written."""
        assert self.folder is not None
        with _saving(self.folder):
            self.manager.wait_until_finished()


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
    from tensorboardX import SummaryWriter

    folder = expand_user(folder).absolute()
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        claim(folder / CONFIG, json.loads(json.dumps(config)), resume)
        _introduce(folder / RUN)
    with (
        checkpoints.manager_of(folder / CHECKPOINTS, keep_last) as manager,
        SummaryWriter(str(folder / TENSORBOARD)) as board,
    ):
        run = Run(folder, manager, board)
        yield run
        run._wait()


@contextmanager
def _saving(folder: Path) -> Iterator[None]:
    """Raises SpecjaxError where a checkpoint cannot be written, now or by what goes on beside."""
    try:
        yield
    except Exception as error:  # Orbax and TensorStore raise many kinds
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SpecjaxError(
            f"a checkpoint in {folder} cannot be written ({reason}); free some space or choose "
            "another folder"
        ) from error


def check_vacant(folder: Path) -> None:
    """Raises SpecjaxError if `folder` holds a run: before anything that takes long."""
    with readable(folder):
        is_taken = (folder / CONFIG).exists()
    if is_taken:
        _refuse_taken(folder)


def _refuse_taken(folder: Path) -> None:
    raise SpecjaxError(
        f"{folder} already holds a run; add --resume to go on with it, or give another folder"
    )


def claim(file: Path, config: dict[str, Any], resume: bool) -> None:
    """Writes the config of a new run, or compares it with that of the run to go on with."""
    if not file.exists():
        _write_json(file, config)
        return
    if not resume:
        _refuse_taken(file.parent)
    if differing := list(_differing(read_json(file), config)):
        raise SpecjaxError(
            f"{file.parent} holds a run with other settings ({', '.join(differing)}); give another "
            "folder, or delete it"
        )


def _differing(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    """The names of values that differ, those of groups within as well."""
    for name in {**found, **wanted}:
        ours, theirs = found.get(name), wanted.get(name)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            yield from _differing(ours, theirs)
        elif ours != theirs:
            yield name


def whole_lines(file: Path) -> list[bytes]:
    """The lines of a file that grew until its process was killed; [] if there is no file."""
    with readable(file):
        lines = file.read_bytes().splitlines(True) if file.exists() else []
    return [line for line in lines if line.endswith(b"\n")]


def keep_lines(file: Path, lines: Sequence[bytes]) -> None:
    """Cuts `file` off behind its first lines, which these are; at once, so never in half."""
    if file.exists():
        with writable(file):
            os.truncate(file, sum(map(len, lines)))


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Whole or not at all: a process may be killed while it writes."""
    unfinished = file.with_name(f".{file.name}.unfinished")
    unfinished.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(file)


def _introduce(file: Path) -> None:
    """Adds this start to the list of those that made the run."""
    starts = read_json(file)["starts"] if file.exists() else []
    start = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "revision": revision(),
        "versions": versions(),
        "devices": [str(device) for device in jax.devices()],
    }
    _write_json(file, {"starts": [*starts, start]})
