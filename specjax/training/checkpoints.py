"""Orbax checkpoints of a run, each with a checksum, the position in the data and a score.

Orbax writes in the background and names a checkpoint once it is complete, but it does not notice
bits that flip later. The checksum does.
"""

import logging
import math
import os
import re
import shutil
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user
from specjax.models.sharding import on_host

STATE, POSITION = "state", "position"  # the items of a checkpoint


class Checkpoints:
    """The newest checkpoints of a run and the best one, in a folder or at a URL."""

    def __init__(self, place: str, keep_last: int):
        import orbax.checkpoint as ocp

        class Manager(ocp.CheckpointManager):
            def metrics(self, step: int) -> PyTree | None:
                try:
                    return super().metrics(step)
                except (OSError, ValueError):  # corrupt: the others must still open
                    return None

        policies = ocp.checkpoint_managers
        best = policies.BestN(get_metric_fn=_score, n=1, keep_checkpoints_without_metrics=False)
        newest_and_best = policies.AnyPreservationPolicy([policies.LatestN(keep_last), best])
        options = ocp.CheckpointManagerOptions(best_fn=_score, preservation_policy=newest_and_best)
        try:
            folder = place if "://" in place else expand_user(place).absolute()
            self.manager = Manager(folder, options=options)
        except Exception as error:  # of the packages behind URLs, or because they are missing
            raise SpecjaxError(
                f"checkpoints cannot be kept in {place} ({_reason(error)}); choose another folder, "
                "or install what writes to the URL: gcsfs for gs://, s3fs for s3://"
            ) from error
        self.place, self.args = str(self.manager.directory), ocp.args

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        try:
            with self._saving():
                self.manager.close()
        except SpecjaxError:  # a full disk often stops the run elsewhere first
            if kind is None:
                raise

    def steps(self) -> list[int]:
        """Returns the steps that were saved, the newest first."""
        return sorted(self.manager.all_steps(), reverse=True)

    def scores(self) -> dict[int, float]:
        """Returns the scores of the measured checkpoints by step, the highest, then newest first.

        `BestN` keeps the newest of equal ones too.
        """
        scores = {step: _score(self.manager.metrics(step)) for step in self.steps()}
        ranked = sorted(scores.items(), key=lambda item: item[1], reverse=True)
        return {step: score for step, score in ranked if score > -math.inf}

    def write(self, step: int, state: PyTree, position: Any, score: float | None) -> None:
        """Writes a checkpoint in the background; `position` is JSON."""
        state = jax.tree.map(jnp.copy, state)  # the next step donates these arrays
        about = {"data": position, "checksum": checksum(state)}
        items = {STATE: self.args.StandardSave(state), POSITION: self.args.JsonSave(about)}
        with self._saving():  # without metrics Orbax warns about checkpoints
            self.manager.save(step, args=self.args.Composite(**items), metrics={"score": score})

    def read(self, step: int, state: PyTree) -> tuple[PyTree, Any]:
        """Reads a state with the structure of `state`, and its position."""
        items = {STATE: self.args.StandardRestore(state), POSITION: self.args.JsonRestore()}
        try:
            restored = self.manager.restore(step, args=self.args.Composite(**items))
            state, about = restored[STATE], restored[POSITION]
            is_intact = about["checksum"] == checksum(state)
        except Exception as error:  # Orbax and TensorStore raise many kinds
            raise SpecjaxError(_reason(error)) from error
        if not is_intact:
            raise SpecjaxError("checksum mismatch")
        return state, about["data"]

    def wait(self) -> None:
        """Waits until all checkpoints are written."""
        with self._saving():
            self.manager.wait_until_finished()

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Reports a checkpoint that cannot be written, now or in the background."""
        try:
            yield
        except Exception as error:  # Orbax and TensorStore raise many kinds
            for path in Path(self.place).glob("*.orbax-checkpoint-tmp*"):  # takes space
                shutil.rmtree(path, ignore_errors=True)
            raise SpecjaxError(
                f"a checkpoint in {self.place} cannot be written ({_reason(error)}); free some "
                "space and continue from the last whole one with --resume, or choose another folder"
            ) from error


def checksum(state: PyTree) -> int:
    """Computes a checksum of all arrays, in their order."""
    total = 0
    for leaf in jax.tree.leaves(state):
        content = np.ascontiguousarray(on_host(leaf)).view(np.uint8)
        total = zlib.crc32(content.ravel().data, total)
    return total


@contextmanager
def quiet() -> Iterator[None]:
    """Hides the tracebacks that Orbax and TensorStore print of errors that Orbax also raises."""

    def is_other(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname

    def show(error: Any) -> None:
        # The first array that fails closes the event loop, to which TensorStore reports the others.
        if str(error.exc_value) != "Event loop is closed":
            before(error)

    logger = logging.getLogger("absl")
    logger.addFilter(is_other)
    before, sys.unraisablehook = sys.unraisablehook, show
    try:
        yield
    finally:
        logger.removeFilter(is_other)
        sys.unraisablehook = before


def _reason(error: Exception) -> str:
    """Shortens an error of Orbax or TensorStore to the system's reason, or to its first words."""
    if number := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(number[1]))
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return shorten(reason, 80, placeholder="...")


def _score(metrics: Any) -> float:
    """Ranks checkpoints that were not measured below all others."""
    score = (metrics or {}).get("score")
    return -math.inf if score is None else score
