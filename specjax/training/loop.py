"""One loop for every objective: deterministic, interruptible, resumable to the same bits.

The batch and the key of a step are functions of its number, so that a checkpoint (params and the
optimizer's state) and its number are all that a run needs to go on as if nothing had happened.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Key, PyTree

from specjax.errors import SpecjaxError
from specjax.training.run_folder import open_run

Metrics = dict[str, Float[Array, ""]]
LossFn = Callable[[PyTree, PyTree, Key[Array, ""]], tuple[Float[Array, ""], Metrics]]
BatchAt = Callable[[int], PyTree]  # step, from 0 -> batch


@dataclass(frozen=True)
class LoopOptions:
    """How long a run is, and how often it saves and logs, in steps.

    Raises:
        SpecjaxError: for a number below 1.
    """

    num_steps: int
    save_every: int = 500
    log_every: int = 100
    seed: int = 0  # of the keys that the loss is given

    def __post_init__(self):
        for name in ("num_steps", "save_every", "log_every"):
            if getattr(self, name) < 1:
                raise SpecjaxError(f"{name} {getattr(self, name)} must be at least 1")


def train(
    loss_fn: LossFn,
    params: PyTree,
    batch_at: BatchAt,
    optimizer: optax.GradientTransformation,
    options: LoopOptions,
    run_folder: str | Path | None = None,
    config: Mapping[str, Any] | None = None,
) -> PyTree:
    """Trains `params` to the end, or on from the newest checkpoint in `run_folder`.

    Args:
        loss_fn: params, batch, key -> loss, metrics (scalars to log beside it); pure.
        params: to start from; they stay as they are.
        batch_at: the batch of a step; the same one whenever it is asked.
        optimizer: its learning-rate schedule included.
        options: number of steps and the like.
        run_folder: gets checkpoints, `metrics.jsonl` and `config.json`; without one nothing is
            kept, and an interrupted run starts again.
        config: all that decides the run, as JSON; a folder is resumed only under the same one.

    Raises:
        SpecjaxError: if the folder cannot be written, belongs to another config or holds a damaged
            checkpoint, or if the loss is no longer finite where it is logged or saved.
    """
    params = jax.tree.map(jnp.copy, params)  # steps donate theirs
    state = {"params": params, "moments": optimizer.init(params)}
    train_step = _train_step(loss_fn, optimizer)
    key = jax.random.key(options.seed)
    with open_run(run_folder, config or {}) as run:
        first, state = run.restored(state)
        for step in range(first, options.num_steps):
            state, metrics = train_step(state, batch_at(step), jax.random.fold_in(key, step))
            done = step + 1
            is_logged, is_saved = (
                done % every == 0 or done == options.num_steps
                for every in (options.log_every, options.save_every)
            )
            if is_logged or is_saved:
                row = {name: float(value) for name, value in metrics.items()}
                _check_finite(row["loss"], done)
            if is_logged:
                run.log({"step": done, **row})
            if is_saved:
                run.save(done, state)
    return state["params"]


def _train_step(loss_fn: LossFn, optimizer: optax.GradientTransformation) -> Callable:
    def train_step(state, batch, key):
        measure = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, metrics), gradient = measure(state["params"], batch, key)
        updates, moments = optimizer.update(gradient, state["moments"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "moments": moments}, {"loss": loss, **metrics}

    return jax.jit(train_step, donate_argnums=0)


def _check_finite(loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise SpecjaxError(
            f"the loss is {loss} at step {step}; lower the learning rate, or check the data for "
            "values that are not finite"
        )
