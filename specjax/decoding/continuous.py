"""Continuous batching: finished sequences of a batch make room for the next prompts."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Key

from specjax.decoding.drafter import Params
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.decoding.engine import Engine
from specjax.decoding.prompt import from_ids
from specjax.decoding.request import as_tuple, check_length
from specjax.decoding.sampling import Sampling
from specjax.decoding.state import LoopState
from specjax.models.prefill import PREFILL_CHUNK
from specjax.models.target import Target

ROUNDS = 16  # per call; then finished sequences are replaced


class QueuedPrompt(NamedTuple):
    """A prompt to continue, under a name."""

    name: Any
    ids: tuple[int, ...]
    key: Key[Array, ""]


def generate_many(
    params: Any,
    queue: list[QueuedPrompt],
    *,
    target: Target,
    sampling: Sampling = Sampling(),
    max_new_tokens: int = 256,
    eos: Iterable[int] | int | None = None,
    batch_size: int = 32,
) -> Iterator[tuple[QueuedPrompt, list[int]]]:
    """Yields each prompt with its new tokens, EOS included, as they finish.

    A continuation depends on its prompt and key alone and equals that of `speculative_generate`.
    Decoding is plain, since a large batch leaves no idle compute for drafts. Prompts of similar
    length share a batch; one program is compiled per length, doubling from 128.

    Args:
        params: the target's.
        queue: prompts, which are removed as they start; more may be added between two results.
        target: the model.
        sampling: temperature, filters, and the verification rule.
        max_new_tokens: maximum per prompt; a text also ends at the target's last position.
        eos: token or tokens that end a continuation.
        batch_size: sequences to decode together.
    """
    engine = Engine(target, Autoregressive(), sampling, max_new_tokens, as_tuple(eos, target))
    while queue:
        width = min(map(_width, queue))
        running: dict[int, QueuedPrompt] = {}  # by place in the batch
        state = None
        while True:
            for place in sorted(set(range(batch_size)) - set(running)):
                prompt = next((prompt for prompt in queue if _width(prompt) == width), None)
                if prompt is None:
                    break
                queue.remove(prompt)
                if state is None:
                    batch = from_ids([prompt.ids] * batch_size, width)
                    engine.check(Params(params), batch, room=1)
                check_length(len(prompt.ids), 1, target.config)
                one = engine.prefill(Params(params), from_ids([prompt.ids], width), prompt.key)
                state = _all_done(one, batch_size) if state is None else state
                state, running[place] = _put(state, one, place, engine), prompt
            if state is None or not running:
                break
            state = engine.run(Params(params), _from_round_0(state), ROUNDS)
            generation = engine.generation(state)
            generation.check()
            tokens, lengths = np.asarray(generation.tokens), np.asarray(generation.length)
            for place in np.flatnonzero(np.asarray(state.is_done)).tolist():
                if place in running:
                    yield running.pop(place), tokens[place, : lengths[place]].tolist()


def _width(prompt: QueuedPrompt) -> int:
    width = PREFILL_CHUNK
    while width < len(prompt.ids):
        width *= 2
    return width


def _from_round_0(state: LoopState) -> LoopState:
    rounds = jnp.zeros_like(state.stats.rounds)  # `run` counts them
    return replace(state, stats=replace(state.stats, rounds=rounds))


def _all_done(state: LoopState, batch_size: int) -> LoopState:
    """Returns a batch of copies of a state of one sequence, all of them done."""
    state = replace(state, is_done=jnp.ones_like(state.is_done))
    return jax.tree.map(
        lambda leaf: jnp.repeat(leaf, batch_size, axis=0) if leaf.ndim else jnp.copy(leaf), state
    )


@partial(jax.jit, static_argnums=3, donate_argnums=0)
def _put(
    batch: LoopState, state: LoopState, place: Int[Array, ""] | int, engine: Engine
) -> LoopState:
    """Replaces one sequence of a batch by a state of one sequence."""

    def put(many: Array, one: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(many, one, place, 0) if many.ndim else many

    return engine.constrain(jax.tree.map(put, batch, state))
