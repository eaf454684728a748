"""The training loop of every objective: deterministic, interruptible, resumable to the same bits.

The key of a step is a function of its number, and the position in the data is saved with params and
optimizer state. Batches are split over the devices; every process builds the whole batch and feeds
its own devices, so that a run does not depend on the number of processes.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from specjax.core.errors import SpecjaxError
from specjax.core.interrupts import Stopped, on_signal
from specjax.core.memory import check_program, explain_out_of_memory
from specjax.core.settings import Checked, setting
from specjax.models.sharding import DATA, Placement, check_batch, make_mesh, place, put_array
from specjax.training.data import Batches
from specjax.training.losses import LossFn, Metrics
from specjax.training.progress import Progress
from specjax.training.run_folder import TrainingRun, open_run

DEFAULT_STEPS = 2000


@dataclass(frozen=True)
class LoopOptions(Checked):
    """Length and intervals of a run, in steps."""

    num_steps: int | None = setting(None, at_least=1)
    """Steps of the optimizer, in place of --epochs; 2000 where --epochs is 0."""
    save_every: int = setting(500, at_least=1)
    """Steps between checkpoints."""
    log_every: int = setting(20, at_least=1)
    """Steps between lines of the metrics."""
    eval_every: int = setting(500, at_least=1)
    """Steps between measurements of the accepted length, by decoding."""
    keep_last: int = setting(2, at_least=1)
    """Newest checkpoints to keep, besides the best."""
    checkpoints: str = ""
    """The place of checkpoints, by default the run folder: a folder, or a URL that Orbax can
    write to, such as gs://BUCKET/RUN (needs gcsfs) or s3://BUCKET/RUN (needs s3fs)."""
    seed: int = setting(0, at_least=0, below=2**32)
    """The seed of the initial weights, the order of the data and the noise."""

    @property
    def total_steps(self) -> int:
        """`num_steps`, or the default."""
        return DEFAULT_STEPS if self.num_steps is None else self.num_steps

    def is_due(self, every: int, done: int) -> bool:
        """Whether a task with period `every` is due after step `done`."""
        return done % every == 0 or done == self.total_steps


@dataclass(frozen=True)
class Evaluation:
    """A measurement of params that returns metrics; the best params have the highest `score`."""

    measure: Callable[[PyTree], Mapping[str, Any]]
    score: str
    about: Mapping[str, Any] = field(default_factory=dict)  # JSON: what it measures on


@dataclass(frozen=True, eq=False)
class Trained:
    """The result of a run: the params of its last step, and those of its best measured one.

    Without a measurement, or without a run folder to keep the best in, that is the last one too.
    """

    params: PyTree
    best_params: PyTree
    best_step: int
    best_score: float | None  # None without a measurement or a run folder


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
    placement: Placement | None = None,
    accumulate: int = 1,
    evaluation: Evaluation | None = None,
    resume: bool = True,
    title: str = "training",
    advice: str = "take smaller batches",
) -> Trained:
    """Trains `params` to the end, from the newest checkpoint in `run_folder` if there is one.

    At SIGINT or SIGTERM it finishes the step, and a measurement that is due, saves, and raises
    `Stopped`; a second signal ends the process at once.

    Args:
        loss_fn: params, frozen params, batch, key -> loss, metrics; pure.
        params: to start from; they are not donated.
        batches: pytrees of arrays, whose sequences are split over the devices.
        optimizer: with its schedule, and the accumulation of `accumulate` batches per step.
        run_folder: for checkpoints, metrics and provenance; without one nothing is kept.
        config: everything that decides the run, as JSON; a run resumes under the same one only.
        frozen: arrays that the loss reads, such as the target's params.
        placement: of the params and of the optimizer's state; by default all devices are for data.
        resume: continue the run in the folder; otherwise the folder must hold none.
        advice: what to do if memory does not suffice.
    """
    placement = placement or Placement(make_mesh(f"{DATA}={jax.device_count()}"), 1, fsdp=True)
    mesh = placement.mesh
    params = place(jax.tree.map(jnp.copy, params), placement)  # steps donate theirs
    state = place({"params": params, "moments": optimizer.init(params)}, placement)
    one_step = train_step(loss_fn, optimizer, state, mesh)
    take_step = _step_taker(one_step, _on(mesh, frozen), mesh, options.seed, accumulate, advice)
    with (
        explain_out_of_memory("the training", advice),
        open_run(run_folder, config or {}, resume, options.keep_last, options.checkpoints) as run,
    ):
        first, state = run.restore(state, batches)
        received: list[int] = []
        with Progress(title, first, options.total_steps) as progress, on_signal(received.append):
            for step in range(first, options.total_steps):
                state, metrics = take_step(step, state, batches, progress)
                score = _report(run, progress, options, evaluation, step + 1, state, metrics)
                stopped_by = _of_any_process(received)
                if stopped_by or score is not None or options.is_due(options.save_every, step + 1):
                    run.save(step + 1, state, batches, score)
                if stopped_by and step + 1 < options.total_steps:
                    run.wait()
                    kept = ", which is saved" if run.checkpoints else ""
                    raise Stopped(stopped_by, f"stopped after step {step + 1}{kept}")
        best = run.best(state) or (options.total_steps, None, state)
        return Trained(state["params"], best[2]["params"], best[0], best[1])


def _step_taker(
    one_step: Any, frozen: PyTree, mesh: Mesh, seed: int, accumulate: int, advice: str
) -> Callable[[int, PyTree, Batches, Progress], tuple[PyTree, Metrics]]:
    """Returns a function that takes one step over `accumulate` batches; metrics are the last's."""
    key, checked = jax.random.key(seed), set()

    def take_step(step, state, batches, progress):
        metrics = {}
        for part in range(step * accumulate, (step + 1) * accumulate):
            batch = next(batches)
            progress.count(batch)
            inputs = (state, frozen, _split(batch, mesh), jax.random.fold_in(key, part))
            # A new shape compiles a program, whose memory is checked before it runs.
            if (shapes := tuple(leaf.shape for leaf in jax.tree.leaves(batch))) not in checked:
                check_program("a training step", one_step.lower(*inputs), inputs, advice)
                checked.add(shapes)
            state, metrics = one_step(*inputs)
        return state, metrics

    return take_step


def train_step(
    loss_fn: LossFn, optimizer: optax.GradientTransformation, state: PyTree, mesh: Mesh
) -> Any:
    """Returns the jitted step: state, frozen params, batch, key -> state, metrics.

    The state, params and moments, is donated, and stays on the devices where `state` lies.
    """

    def step(state, frozen, batch, key):
        measure = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, metrics), gradient = measure(state["params"], frozen, batch, key)
        updates, moments = optimizer.update(gradient, state["moments"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "moments": moments}, {"loss": loss, **metrics}

    shardings = jax.tree.map(lambda leaf: leaf.sharding, state), NamedSharding(mesh, P())
    return jax.jit(step, donate_argnums=0, out_shardings=shardings)


def _split(batch: PyTree, mesh: Mesh) -> PyTree:
    """Splits the sequences of a batch over the devices."""
    check_batch(mesh, jax.tree.leaves(batch)[0].shape[0], "a batch of")
    return jax.tree.map(lambda leaf: put_array(leaf, NamedSharding(mesh, P(DATA))), batch)


def _on(mesh: Mesh, frozen: PyTree) -> PyTree:
    """Copies arrays that are not on the mesh to each of its devices."""

    def put(leaf):
        is_there = getattr(getattr(leaf, "sharding", None), "mesh", None) == mesh
        return leaf if is_there else put_array(leaf, NamedSharding(mesh, P()))

    return jax.tree.map(put, frozen)


def _of_any_process(signals: list[int]) -> int:
    """Returns the signal that any process got, or 0, so that all stop after the same step."""
    return int(np.max(multihost_utils.process_allgather(np.int32(max(signals, default=0)))))


def _report(
    run: TrainingRun,
    progress: Progress,
    options: LoopOptions,
    evaluation: Evaluation | None,
    done: int,
    state: PyTree,
    metrics: Metrics,
) -> float | None:
    """Logs and measures if due after step `done`; returns the score if it measured."""
    is_logged = options.is_due(options.log_every, done)
    is_measured = evaluation is not None and options.is_due(options.eval_every, done)
    if is_logged or is_measured or options.is_due(options.save_every, done):
        numbers = {name: np.asarray(metrics[name]).tolist() for name in ("loss", *metrics)}
        if not math.isfinite(numbers["loss"]):
            raise SpecjaxError(
                f"the loss is {numbers['loss']} at step {done}; lower the learning rate, or check "
                "the data for values that are not finite"
            )
        if is_logged:
            run.log({"step": done, **numbers, **progress.show(done, numbers)})
    if evaluation is None or not is_measured:
        return None
    measured = progress.measure(done, evaluation.measure, state["params"])
    run.log({"step": done, **measured})
    return float(measured[evaluation.score])
