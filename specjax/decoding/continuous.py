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
from specjax.decoding.prompt import doubled_length, from_ids
from specjax.decoding.request import end_tokens
from specjax.decoding.sampling import Sampling
from specjax.decoding.state import Generation, LoopState, Prefix
from specjax.models.prefill import PREFILL_CHUNK
from specjax.models.target import Target

ROUNDS = 16  # per call; then finished sequences are replaced


class Batch:
    """Sequences of one engine that are decoded together, but begin and end at different times.

    The text of each is that of its prompt alone. The first sequence runs by itself until there is
    another; then the batch has `size` places, and those that are free cost as much as the others.
    """

    def __init__(self, engine: Engine, params: Params, size: int):
        self.engine, self.params, self.size = engine, params, size
        self.state: LoopState | None = None

    def put(self, place: int, state: LoopState) -> None:
        """Begins a sequence at a free place, with its state after prefill.

        The states of all sequences must have equal shapes.
        """
        batch = self.state
        if place == 0 and (batch is None or len(batch.length) == 1):
            self.state = state
            return
        if batch is None or len(batch.length) < self.size:
            first, batch = batch, _all_done(state, self.size)
            batch = batch if first is None else _put(batch, first, 0, self.engine)
        self.state = _put(batch, state, place, self.engine)

    def run(self, max_rounds: int) -> tuple[Generation, np.ndarray]:
        """Runs some rounds; returns all new tokens so far, and which sequences are done."""
        state = self.state
        assert state is not None
        before = state.stats.rounds
        stats = replace(state.stats, rounds=jnp.zeros_like(before))  # `run` counts them
        state = self.engine.run(self.params, replace(state, stats=stats), max_rounds)
        stats = replace(state.stats, rounds=before + state.stats.rounds)
        self.state = state = replace(state, stats=stats)
        return self.engine.generation(state), np.asarray(state.is_done)

    def end(self, place: int) -> Prefix:
        """Frees a place and returns the text that was there."""
        state = self.state
        assert state is not None
        prefix = Prefix(state.tokens, state.length, state.cache, state.hidden)
        if len(state.length) == 1:
            self.state = None  # `run` would donate the arrays of the prefix
            return prefix
        self.state = replace(state, is_done=state.is_done.at[place].set(True))
        return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, place, 1), prefix)


class QueuedPrompt(NamedTuple):
    """A prompt to continue, under a name."""

    name: Any
    ids: tuple[int, ...]
    key: Key[Array, ""]

    @property
    def width(self) -> int:
        """The length that it is padded to."""
        return doubled_length(self.ids, PREFILL_CHUNK)


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

    `params` are the target's. A text ends at `max_new_tokens`, at an `eos` token, or where the
    target has no more positions. `batch_size` sequences decode together. Prompts are removed from
    the queue as they start; more may be added between two results.
    """
    engine = Engine(target, Autoregressive(), sampling, max_new_tokens, end_tokens(eos, target))
    while queue:
        first = min(queue, key=lambda prompt: prompt.width)
        prompts = from_ids([first.ids] * batch_size, first.width)
        engine.check(Params(params), prompts, room=1)
        batch = Batch(engine, Params(params), batch_size)
        running: dict[int, QueuedPrompt] = {}  # by place in the batch
        while True:
            for place in sorted(set(range(batch_size)) - set(running)):
                prompt = next((prompt for prompt in queue if prompt.width == first.width), None)
                if prompt is None:
                    break
                queue.remove(prompt)
                alone = from_ids([prompt.ids], first.width)
                engine.check(Params(params), alone, room=1, with_memory=False)
                batch.put(place, engine.prefill(Params(params), alone, prompt.key))
                running[place] = prompt
            if not running:
                break
            generation, is_done = batch.run(ROUNDS)
            generation.check()
            tokens, lengths = np.asarray(generation.tokens), np.asarray(generation.length)
            for place in np.flatnonzero(is_done).tolist():
                if place in running:
                    yield running.pop(place), tokens[place, : lengths[place]].tolist()


def _all_done(state: LoopState, batch_size: int) -> LoopState:
    """Returns a batch of copies of a state of one sequence, all of them done."""

    def copies(leaf: Array) -> Array:
        return jnp.repeat(leaf, batch_size, axis=0) if _is_of_sequence(leaf) else jnp.copy(leaf)

    return jax.tree.map(copies, replace(state, is_done=jnp.ones_like(state.is_done)))


def _is_of_sequence(leaf: Array) -> bool:
    """Whether an array in the state of one sequence belongs to it, not to all of a batch."""
    return leaf.shape[:1] == (1,)


@partial(jax.jit, static_argnums=3, donate_argnums=0)
def _put(
    batch: LoopState, state: LoopState, place: Int[Array, ""] | int, engine: Engine
) -> LoopState:
    """Replaces one sequence of a batch by a state of one sequence."""

    def put(many: Array, one: Array) -> Array:
        if not _is_of_sequence(one):
            return many
        return lax.dynamic_update_slice_in_dim(many, one, place, 0)

    return engine.constrain(jax.tree.map(put, batch, state))
