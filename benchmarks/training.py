"""Measures the cost of training a head: python -m benchmarks.training

Times in turn, on the same batch: the target's own pass with its logits (what a plain evaluation
costs), and training steps of EAGLE and of HASS with 1 to 4 steps of alignment. The target's pass is
part of every step, except with `--kept`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.harness import at_least_1, in_turn, main, random_target, table
from specjax import LoadedTarget, load
from specjax.models.heads.layered import DRAFT_TOKENS
from specjax.training import HeadTraining
from specjax.training.objectives.base import hidden_states
from specjax.training.objectives.eagle import EagleTraining
from specjax.training.objectives.hass import HassTraining

PASS, EAGLE, HASS = "target's pass", "eagle", "hass, {} steps"
MAX_STEPS = 4


@dataclass(frozen=True)
class TrainingOptions:
    """The options of this benchmark."""

    target: str = "pocket"  # pocket, a folder in Hugging Face format, or a hub id
    size: str = ""  # 160m, 7b or tiny: a random target of this shape in place of --target
    batch_size: int = 8  # rows of the batch
    length: int = 512  # tokens of each row; all of them count
    repeats: int = 7  # how often each is timed
    recompute: bool = False  # compute activations again for the gradients
    dtype: str = ""  # the dtype; by default the fastest here
    draft_vocab: int = 0  # tokens that the heads draft; 0: all
    kept: bool = False  # steps read hidden states that were kept


def steps_of(target: LoadedTarget, options: TrainingOptions) -> dict[str, Callable[[], Any]]:
    """Returns the target's pass, and one training step of every kind."""
    shape, vocabulary = (options.batch_size, options.length), target.config.vocab_size
    tokens = np.random.default_rng(0).integers(vocabulary, size=shape, dtype=np.int32)
    batch = {
        "tokens": jnp.asarray(tokens),
        "is_answer": jnp.ones(shape, bool),
        "segments": jnp.ones(shape, jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(options.length), shape),
    }
    optimizer, key = optax.adamw(1e-5), jax.random.key(1)
    read = jax.jit(hidden_states, static_argnums=(0, 2))
    places = [batch[name] for name in ("tokens", "positions", "segments")]

    @jax.jit
    def target_pass(params):
        features = read(target.model, params, (-1,), *places)[:, :, 0]
        return jnp.sum(target.model.logits(params, features))

    if options.kept:
        batch["hidden"] = read(target.model, target.params, (-1,), *places)[:, :, 0]

    def training_step(training: HeadTraining) -> Callable[[], Any]:
        head = training.new_head(target.config)
        loss_fn = training.loss(head, target.model, options.recompute)
        state = head.initialise(jax.random.key(0))
        fixed = {name: state.pop(name) for name in [DRAFT_TOKENS] if name in state}
        moments = optimizer.init(state)

        @jax.jit
        def step(state, moments, params):
            gradient = jax.grad(lambda state: loss_fn(state | fixed, params, batch, key)[0])(state)
            updates, new_moments = optimizer.update(gradient, moments, state)
            return optax.apply_updates(state, updates), new_moments

        return lambda: step(state, moments, target.params)

    drafted = options.draft_vocab
    made = {
        PASS: lambda: target_pass(target.params),
        EAGLE: training_step(EagleTraining(draft_vocab=drafted)),
    }
    for count in range(1, MAX_STEPS + 1):
        made[HASS.format(count)] = training_step(
            HassTraining(align_steps=count, draft_vocab=drafted)
        )
    return made


def cost_rows(seconds: Mapping[str, Sequence[float]], num_tokens: int) -> list[list[str]]:
    """Returns tokens per second, and the cost over EAGLE's and over the target's pass, in pairs."""
    rows = []
    for name, times in seconds.items():
        costs = [median(np.divide(times, seconds[other])) for other in (EAGLE, PASS)]
        speed = f"{num_tokens / median(times):.0f}"
        rows.append([name, speed, *(f"{cost:.2f}" for cost in costs)])
    return rows


def run(options: TrainingOptions) -> None:
    """Measures and prints the table."""
    at_least_1(options, "batch_size", "length", "repeats")
    if options.size:
        target = random_target(options.size, options.length)
    else:
        target = load(options.target, options.dtype or None, packed=False)
    num_tokens = options.batch_size * options.length
    rows = cost_rows(in_turn(steps_of(target, options), options.repeats), num_tokens)
    header = f"a step over {num_tokens} tokens", "tokens/s", "x eagle", "x target's pass"
    print(table(header, rows))
    print(f"medians of {options.repeats} steps in turn on {jax.devices()[0].device_kind}")


if __name__ == "__main__":
    main(run, TrainingOptions, __doc__)
