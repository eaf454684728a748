"""What training a head costs: `python -m specjax.bench.training`.

Times, in turn on the same batch: the target's own pass with its logits (what a plain evaluation
costs), and training steps of EAGLE and of HASS with 1 to 4 steps of alignment. The target's pass is
part of every step.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console
from rich.table import Table

from specjax.bench.shapes import random_target
from specjax.core.errors import SpecjaxError, exit_code
from specjax.hub import load
from specjax.models.heads.eagle import EagleConfig, EagleHead
from specjax.models.transformer import Transformer
from specjax.training.features import target_features
from specjax.training.objectives.eagle import eagle_loss
from specjax.training.objectives.hass import hass_loss
from specjax.training.objectives.options import EagleObjective, HassObjective

TARGET, EAGLE, HASS = "target's pass", "eagle", "hass, {} steps"
MOST_STEPS = 4


@dataclass(frozen=True)
class Options:
    """What does training a head cost?"""

    target: str = "pocket"
    """The model: pocket, a folder in Hugging Face format, or a hub id."""
    size: str = ""
    """160m, 7b or tiny: a random target of this shape in place of --target."""
    batch_size: int = 8
    """Rows of the batch."""
    length: int = 512
    """Tokens of each row; all of them count."""
    repeats: int = 7
    """How often each is timed."""
    remat: bool = False
    """Compute activations again for the gradients."""


def timed(steps: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each step, which are run in turn; compiling is not counted."""
    for step in steps.values():
        jax.block_until_ready(step())
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            started = time.perf_counter()
            jax.block_until_ready(step())
            seconds[name].append(time.perf_counter() - started)
    return seconds


def steps_of(target: Transformer, params: Any, options: Options) -> dict[str, Callable[[], Any]]:
    """The target's pass, and one training step of every kind."""
    shape = options.batch_size, options.length
    tokens = np.random.default_rng(0).integers(target.config.vocab_size, size=shape, dtype=np.int32)
    batch = {
        "tokens": jnp.asarray(tokens),
        "is_answer": jnp.ones(shape, bool),
        "segments": jnp.ones(shape, jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(options.length), shape),
    }
    head = EagleHead(EagleConfig.for_target(target.config))
    state = head.initialise(jax.random.key(0))
    optimizer = optax.adamw(1e-5)
    moments, key = optimizer.init(state), jax.random.key(1)

    @jax.jit
    def target_pass(params):
        features = target_features(
            target, params, batch["tokens"], batch["positions"], batch["segments"]
        )
        return jnp.sum(target.logits(params, features))

    def training_step(loss_fn):
        @jax.jit
        def step(state, moments, params):
            gradient, _ = jax.grad(loss_fn, has_aux=True)(state, params, batch, key)
            updates, new_moments = optimizer.update(gradient, moments, state)
            return optax.apply_updates(state, updates), new_moments

        return lambda: step(state, moments, params)

    made = {TARGET: lambda: target_pass(params)}
    made[EAGLE] = training_step(eagle_loss(head, target, EagleObjective(), options.remat))
    for num_steps in range(1, MOST_STEPS + 1):
        loss_fn = hass_loss(head, target, HassObjective(align_steps=num_steps), options.remat)
        made[HASS.format(num_steps)] = training_step(loss_fn)
    return made


def cost_table(seconds: dict[str, list[float]], num_tokens: int) -> Table:
    """Tokens per second, and the cost beside EAGLE's and beside the target's pass, in pairs."""
    columns = "tokens/s", "x eagle", "x target's pass"
    table = Table(f"a step over {num_tokens} tokens", *columns, box=None)
    for name, own in seconds.items():
        beside = [median(np.divide(own, seconds[other])) for other in (EAGLE, TARGET)]
        table.add_row(name, f"{num_tokens / median(own):.0f}", *(f"{cost:.2f}" for cost in beside))
    return table


def _run(options: Options) -> None:
    if min(options.batch_size, options.length, options.repeats) < 1:
        raise SpecjaxError("batch_size, length and repeats must be at least 1")
    if options.size:
        model, params, _ = random_target(options.size, options.length)
    else:
        target = load(options.target)
        model, params = target.model, target.params
    seconds = timed(steps_of(model, params, options), options.repeats)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    console.print(cost_table(seconds, options.batch_size * options.length))
    print(f"medians of {options.repeats} steps in turn on {jax.devices()[0].device_kind}")


if __name__ == "__main__":
    sys.exit(exit_code(partial(_run, tyro.cli(Options, description=__doc__))))
