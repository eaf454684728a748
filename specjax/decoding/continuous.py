"""Continuous batching: many prompts through one batch, whose finished rows take the next prompt."""

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

ROUNDS = 16  # between two looks at which rows are done


class QueuedPrompt(NamedTuple):
    """A prompt that waits for its continuation."""

    name: Any
    ids: tuple[int, ...]
    key: Key[Array, ""]


def generate_many(
    params: Any,
    waiting: list[QueuedPrompt],
    *,
    target: Target,
    sampling: Sampling = Sampling(),
    max_new_tokens: int = 256,
    eos: Iterable[int] | int | None = None,
    batch_size: int = 32,
) -> Iterator[tuple[QueuedPrompt, list[int]]]:
    """Yields each prompt with its new tokens, EOS included, in the order in which they end.

    A continuation depends on its prompt and key alone: it is that of `speculative_generate`,
    whatever else is in the batch. Decoding is plain, since a large batch leaves no rows idle for
    drafts. Prompts of similar length share a batch; one program is compiled per length, doubling
    from 128.

    Args:
        params: the target's.
        waiting: is emptied, and may be added to between two results.
        target: the model.
        sampling: temperature, filters, and the verification rule.
        max_new_tokens: new tokens per prompt at most; a text also ends at the target's last
            position.
        eos: token or tokens that end a continuation.
        batch_size: rows that are decoded together.
    """
    engine = Engine(target, Autoregressive(), sampling, max_new_tokens, as_tuple(eos, target))
    while waiting:
        width = min(_width(ask) for ask in waiting)
        rows: dict[int, QueuedPrompt] = {}
        state = None
        while True:
            for row in sorted(set(range(batch_size)) - set(rows)):
                ask = next((each for each in waiting if _width(each) == width), None)
                if ask is None:
                    break
                waiting.remove(ask)
                prompt = from_ids([ask.ids], width)
                if state is None:
                    engine.check(Params(params), from_ids([ask.ids] * batch_size, width), room=1)
                check_length(len(ask.ids), 1, target.config)
                started = engine.prefill(Params(params), prompt, ask.key)
                state = _all_done(started, batch_size) if state is None else state
                state, rows[row] = _put(state, started, row, engine), ask
            if state is None or not rows:
                break
            state = engine.run(Params(params), _from_round_0(state), ROUNDS)
            generation = engine.generation(state)
            generation.check()
            tokens, lengths = np.asarray(generation.tokens), np.asarray(generation.length)
            for row in np.flatnonzero(np.asarray(state.is_done)).tolist():
                if row in rows:
                    yield rows.pop(row), tokens[row, : lengths[row]].tolist()


def _width(ask: QueuedPrompt) -> int:
    width = PREFILL_CHUNK
    while width < len(ask.ids):
        width *= 2
    return width


def _from_round_0(state: LoopState) -> LoopState:
    rounds = jnp.zeros_like(state.stats.rounds)  # which `run` counts
    return replace(state, stats=replace(state.stats, rounds=rounds))


def _all_done(state: LoopState, batch_size: int) -> LoopState:
    """Returns a batch of copies of a state of one row, none of them active."""
    state = replace(state, is_done=jnp.ones_like(state.is_done))
    return jax.tree.map(
        lambda leaf: jnp.repeat(leaf, batch_size, axis=0) if leaf.ndim else jnp.copy(leaf), state
    )


@partial(jax.jit, static_argnums=3, donate_argnums=0)
def _put(
    batch: LoopState, state: LoopState, row: Int[Array, ""] | int, engine: Engine
) -> LoopState:
    """Replaces one row of a batch by a state of one row."""

    def put(many: Array, one: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(many, one, row, 0) if many.ndim else many

    return engine.constrain(jax.tree.map(put, batch, state))
