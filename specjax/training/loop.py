"""One loop for every objective: deterministic, interruptible, resumable to the same bits.

The key of a step is a function of its number, and the position in the data is saved with the
params and the optimizer's state, so that a checkpoint is all that a run needs to go on as if
nothing had happened. Batches are spread over whatever devices there are.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Key, PyTree

from specjax.errors import SpecjaxError
from specjax.training.config import LoopOptions
from specjax.training.data import Batches
from specjax.training.progress import Progress
from specjax.training.run_folder import open_run

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
    everywhere = NamedSharding(mesh, P())
    params = jax.tree.map(jnp.copy, params)  # steps donate theirs
    state = jax.device_put({"params": params, "moments": optimizer.init(params)}, everywhere)
    frozen = jax.device_put(frozen, everywhere)
    train_step = _train_step(loss_fn, optimizer)
    key = jax.random.key(options.seed)
    with (
        _memory_advice(advice),
        open_run(run_folder, config or {}, resume, options.keep_last) as run,
    ):
        first, state = run.restored(state, batches)
        with Progress(title, first, options.total_steps) as progress:
            for step in range(first, options.total_steps):
                metrics = {}
                for part in range(accumulate):
                    batch = next(batches)
                    progress.count(batch)
                    part_key = jax.random.fold_in(key, step * accumulate + part)
                    state, metrics = train_step(state, frozen, _spread(batch, mesh), part_key)
                done = step + 1
                is_logged, is_measured, is_saved = (
                    done % every == 0 or done == options.total_steps
                    for every in (options.log_every, options.eval_every, options.save_every)
                )
                is_measured = is_measured and evaluation is not None
                if is_logged or is_measured or is_saved:
                    row = _numbers(metrics, done)
                    if is_logged:
                        run.log({"step": done, **row, **progress.show(done, row)})
                score = None
                if evaluation is not None and is_measured:
                    measured = progress.measure(done, evaluation.measure, state["params"])
                    run.log({"step": done, **measured})
                    score = float(measured[evaluation.score])
                if is_saved or is_measured:
                    run.save(done, state, batches, score)
        best = run.best(state)
    if best is None:
        return Trained(state["params"], state["params"], options.total_steps, None)
    step, score, best_state = best
    return Trained(state["params"], best_state["params"], step, score)


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
