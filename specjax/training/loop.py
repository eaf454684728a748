"""One loop for every objective: deterministic, interruptible, resumable to the same bits.

The key of a step is a function of its number, and the position in the data is saved with the
params and the optimizer's state, so that a checkpoint is all that a run needs to go on as if
nothing had happened. Batches are spread over whatever devices there are.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Key, PyTree

from specjax.core.errors import SpecjaxError
from specjax.training.config import LoopOptions
from specjax.training.data import Batches
from specjax.training.progress import Progress
from specjax.training.run_folder import Run, open_run

OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory")  # as devices say it, and as the CPU does

Metrics = dict[str, Array]  # scalars, or one number per depth of a draft
# params, what is frozen, batch, key -> loss, metrics
LossFn = Callable[[PyTree, PyTree, PyTree, Key[Array, ""]], tuple[Float[Array, ""], Metrics]]
Evaluate = Callable[[PyTree], Mapping[str, Any]]  # params -> metrics, one of them the score


@dataclass(frozen=True)
class Evaluation:
    """A measurement that the loop takes now and then: `score` names the metric to be high."""

    measure: Evaluate
    score: str


@dataclass(frozen=True, eq=False)
class Trained:
    """What a run leaves: the params of its last step, and those of its best measured one."""

    params: PyTree
    best_params: PyTree
    best_step: int
    best_score: float | None  # None if nothing was measured


def train(
    loss_fn: LossFn,
    params: PyTree,
    batches: Batches,
    optimizer: optax.GradientTransformation,
    options: LoopOptions,
    run_folder: str | Path | None = None,
    config: Mapping[str, Any] | None = None,
    *,
    frozen: PyTree = None,
    accumulate: int = 1,
    evaluation: Evaluation | None = None,
    resume: bool = True,
    title: str = "training",
    advice: str = "take smaller batches",
) -> Trained:
    """Trains `params` to the end, or on from the newest checkpoint in `run_folder`.

    Args:
        loss_fn: params, what is frozen, batch, key -> loss, metrics to log beside it; pure.
        params: to start from; they stay as they are.
        batches: pytrees of arrays, whose rows are spread over the devices.
        optimizer: its learning-rate schedule included, and the accumulation.
        options: number of steps and the like.
        run_folder: gets checkpoints, metrics and what the run was; without one nothing is kept,
            and an interrupted run starts again.
        config: all that decides the run, as JSON; a folder is resumed only under the same one.
        frozen: arrays that the loss reads, such as the target's params.
        accumulate: batches of one step.
        evaluation: taken every `eval_every` steps and at the end.
        resume: go on with the run in the folder; otherwise the folder must hold none.
        title: of the progress bar.
        advice: what to do when memory is short.

    Raises:
        SpecjaxError: if the folder cannot be written, belongs to another config or holds damaged
            checkpoints only, if the loss is no longer finite where it is logged or saved, if rows
            do not spread evenly over the devices, or if memory is short.
    """
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    params = jax.tree.map(jnp.copy, params)  # steps donate theirs
    state = {"params": params, "moments": optimizer.init(params)}
    state, frozen = jax.device_put((state, frozen), NamedSharding(mesh, P()))  # everywhere
    take_step = _step_taker(_train_step(loss_fn, optimizer), frozen, mesh, options.seed, accumulate)
    with (
        _memory_advice(advice),
        open_run(run_folder, config or {}, resume, options.keep_last) as run,
    ):
        first, state = run.restored(state, batches)
        with Progress(title, first, options.total_steps) as progress:
            record = partial(_record, run, progress, options, evaluation, batches)
            for step in range(first, options.total_steps):
                state, metrics = take_step(step, state, batches, progress)
                record(step + 1, state, metrics)
        return _trained(state, run.best(state), options.total_steps)


def _step_taker(
    train_step: Callable, frozen: PyTree, mesh: Mesh, seed: int, accumulate: int
) -> Callable[[int, PyTree, Batches, Progress], tuple[PyTree, Metrics]]:
    """What takes one step, over the next `accumulate` batches; metrics are those of the last."""
    key = jax.random.key(seed)

    def take_step(step, state, batches, progress):
        metrics = {}
        for part in range(step * accumulate, (step + 1) * accumulate):
            batch = next(batches)
            progress.count(batch)
            part_key = jax.random.fold_in(key, part)
            state, metrics = train_step(state, frozen, _spread(batch, mesh), part_key)
        return state, metrics

    return take_step


def _train_step(loss_fn: LossFn, optimizer: optax.GradientTransformation) -> Callable:
    def train_step(state, frozen, batch, key):
        measure = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, metrics), gradient = measure(state["params"], frozen, batch, key)
        updates, moments = optimizer.update(gradient, state["moments"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "moments": moments}, {"loss": loss, **metrics}

    return jax.jit(train_step, donate_argnums=0)


def _spread(batch: PyTree, mesh: Mesh) -> PyTree:
    """The batch, its rows shared out over the devices."""
    count = mesh.size
    num_rows = jax.tree.leaves(batch)[0].shape[0]
    if num_rows % count:
        raise SpecjaxError(
            f"{num_rows} rows do not spread evenly over {count} devices; take a batch size that "
            f"{count} divides"
        )
    return jax.device_put(batch, NamedSharding(mesh, P("data")))


def _record(
    run: Run,
    progress: Progress,
    options: LoopOptions,
    evaluation: Evaluation | None,
    batches: Batches,
    done: int,
    state: PyTree,
    metrics: Metrics,
) -> None:
    """Logs, measures and saves after `done` steps, if it is time; whatever is measured is saved."""
    is_logged, is_measured, is_saved = (
        done % every == 0 or done == options.total_steps
        for every in (options.log_every, options.eval_every, options.save_every)
    )
    due = evaluation if is_measured else None
    is_saved = is_saved or due is not None
    if is_logged or is_saved:
        row = _numbers(metrics, done)
        if is_logged:
            run.log({"step": done, **row, **progress.show(done, row)})
    score = None
    if due is not None:
        measured = progress.measure(done, due.measure, state["params"])
        run.log({"step": done, **measured})
        score = float(measured[due.score])
    if is_saved:
        run.save(done, state, batches, score)


def _trained(state: PyTree, best: tuple[int, float, PyTree] | None, total_steps: int) -> Trained:
    if best is None:
        return Trained(state["params"], state["params"], total_steps, None)
    step, score, best_state = best
    return Trained(state["params"], best_state["params"], step, score)


def _numbers(metrics: Metrics, step: int) -> dict[str, Any]:
    """The metrics as Python numbers and lists; waits for the step."""
    row = {name: np.asarray(metrics[name]).tolist() for name in ("loss", *metrics)}
    if not math.isfinite(row["loss"]):
        raise SpecjaxError(
            f"the loss is {row['loss']} at step {step}; lower the learning rate, or check the data "
            "for values that are not finite"
        )
    return row


@contextmanager
def _memory_advice(advice: str) -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not any(sign in str(error) for sign in OUT_OF_MEMORY):
            raise
        raise SpecjaxError(f"the training does not fit in memory; {advice}") from error
