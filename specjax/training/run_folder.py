"""The folder of a training run: its config, its checkpoints, its metrics as JSON lines."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import PyTree

from specjax.errors import SpecjaxError
from specjax.files import expand_user, read_json, readable, writable

CHECKPOINTS, METRICS, CONFIG = "checkpoints", "metrics.jsonl", "config.json"
NUM_KEPT = 2  # checkpoints


@dataclass(frozen=True)
class Run:
    """What a run keeps; nothing without a folder. `manager` is Orbax's."""

    folder: Path | None = None
    manager: Any = None

    def restored(self, state: PyTree) -> tuple[int, PyTree]:
        """The newest checkpoint and its step, or 0 and `state` where there is none.

        Raises:
            SpecjaxError: if the checkpoint cannot be read or is of another shape.
        """
        if self.folder is None:
            return 0, state
        import orbax.checkpoint as ocp

        first = self.manager.latest_step() or 0
        if first:
            try:
                state = self.manager.restore(first, args=ocp.args.StandardRestore(state))
            except Exception as error:  # Orbax and TensorStore raise many kinds
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                raise SpecjaxError(
                    f"checkpoint {first} in {self.folder} cannot be read ({reason}); delete that "
                    "folder and train again"
                ) from error
        self._forget_after(first)
        return first, state

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
        """Appends one line to the metrics."""
        if self.folder is not None:
            file = self.folder / METRICS
            with writable(file), file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")

    def save(self, step: int, state: PyTree) -> None:
        """Writes a checkpoint, wholly or not at all, and waits for it."""
        if self.folder is not None:
            import orbax.checkpoint as ocp

            with writable(self.folder):
                self.manager.save(step, args=ocp.args.StandardSave(state))
                self.manager.wait_until_finished()  # the next step gives these arrays away


@contextmanager
def open_run(folder: str | Path | None, config: Mapping[str, Any]) -> Iterator[Run]:
    """The run in `folder`, new or to be resumed.

    Raises:
        SpecjaxError: if the folder cannot be written, or holds a run with another config.
    """
    if folder is None:
        yield Run()
        return
    import orbax.checkpoint as ocp

    folder = expand_user(folder).absolute()
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _claim(folder / CONFIG, json.loads(json.dumps(config)))
    options = ocp.CheckpointManagerOptions(max_to_keep=NUM_KEPT)
    with ocp.CheckpointManager(folder / CHECKPOINTS, options=options) as manager:
        yield Run(folder, manager)


def _claim(file: Path, config: dict[str, Any]) -> None:
    """Writes the config of a new run, or compares it with that of the run to go on with."""
    if not file.exists():
        file.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    elif (found := read_json(file)) != config:
        differing = [name for name in found | config if found.get(name) != config.get(name)]
        raise SpecjaxError(
            f"{file.parent} holds a run with other settings ({', '.join(differing)}); give another "
            "folder, or delete it"
        )
