"""Orbax checkpoints of a run, each with a checksum, the position in the data and a score.

A checkpoint is written in the background and gets its name once it is complete. Later corruption
shows as a checksum mismatch, or as an error of Orbax.
"""

import logging
import math
import os
import re
import shutil
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from specjax.core.errors import SpecjaxError
from specjax.models.sharding import on_host

STATE, POSITION = "state", "position"  # the items of a checkpoint
NO_SCORE = -math.inf  # ranks checkpoints that were not measured below all others


def manager_of(folder: Path | str, keep_last: int) -> Any:
    """Returns Orbax's manager of a folder or URL; it keeps the newest checkpoints and the best."""
    import orbax.checkpoint as ocp

    class Manager(ocp.CheckpointManager):
        def metrics(self, step: int) -> PyTree | None:
            try:
                return super().metrics(step)
            except Exception:  # corrupt: the others must still open
                return None

    policies = ocp.checkpoint_managers
    best = policies.BestN(get_metric_fn=_score, n=1, keep_checkpoints_without_metrics=False)
    newest_and_best = policies.AnyPreservationPolicy([policies.LatestN(keep_last), best])
    options = ocp.CheckpointManagerOptions(best_fn=_score, preservation_policy=newest_and_best)
    return Manager(folder, options=options)


def write(manager: Any, step: int, state: PyTree, data: Any, score: float | None) -> None:
    """Writes a checkpoint in the background; `data` is the position in the data, as JSON."""
    import orbax.checkpoint as ocp

    state = jax.tree.map(jnp.copy, state)  # the next step donates these arrays
    position = {"data": data, "checksum": checksum(state)}
    items = {STATE: ocp.args.StandardSave(state), POSITION: ocp.args.JsonSave(position)}
    # Without metrics Orbax would warn about every checkpoint that was not measured.
    manager.save(step, args=ocp.args.Composite(**items), metrics={"score": score})


def read(manager: Any, step: int, state: PyTree) -> tuple[PyTree, Any]:
    """Reads a state with the structure of `state`, and the position in the data.

    Raises:
        SpecjaxError: if the checkpoint is corrupt; the message is the reason alone.
    """
    import orbax.checkpoint as ocp

    items = {STATE: ocp.args.StandardRestore(state), POSITION: ocp.args.JsonRestore()}
    try:
        found = manager.restore(step, args=ocp.args.Composite(**items))
        position = found[POSITION]
        is_intact = position["checksum"] == checksum(found[STATE])
    except Exception as error:  # Orbax and TensorStore raise many kinds
        raise SpecjaxError(reason_of(error)) from error
    if not is_intact:
        raise SpecjaxError("checksum mismatch")
    return found[STATE], position["data"]


def reason_of(error: Exception) -> str:
    """Shortens what Orbax and TensorStore say to the system's reason, or to the first words."""
    if number := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(number[1]))
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return shorten(reason, 80, placeholder="...")


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps Orbax and TensorStore from printing the tracebacks of errors that Orbax also raises."""

    def is_other(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname

    def show(late: Any) -> None:
        # The first array that fails closes the event loop, to which TensorStore reports the others.
        if str(late.exc_value) != "Event loop is closed":
            before(late)

    logger = logging.getLogger("absl")
    logger.addFilter(is_other)
    before, sys.unraisablehook = sys.unraisablehook, show
    try:
        yield
    finally:
        logger.removeFilter(is_other)
        sys.unraisablehook = before


def drop_unfinished(folder: Any) -> None:
    """Deletes checkpoints that were not written whole, so that they take no space on a disk."""
    for path in Path(folder).glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(path, ignore_errors=True)


def scores(manager: Any) -> dict[int, float]:
    """Returns the scores of the measured checkpoints by step, the highest first."""
    found = {step: _score(manager.metrics(step)) for step in manager.all_steps()}
    ranked = sorted(found, key=lambda step: found[step], reverse=True)
    return {step: found[step] for step in ranked if found[step] > NO_SCORE}


def checksum(state: PyTree) -> int:
    """Computes a checksum of all arrays, in their order."""
    total = 0
    for leaf in jax.tree.leaves(state):
        content = np.ascontiguousarray(on_host(leaf)).view(np.uint8)
        total = zlib.crc32(content.ravel().data, total)
    return total


def _score(metrics: Mapping[str, Any] | None) -> float:
    score = (metrics or {}).get("score")
    return NO_SCORE if score is None else score
