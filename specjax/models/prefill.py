"""Prefill: writes a prompt to the cache, in chunks."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.models.cache import KVCache, resized
from specjax.models.target import ModelOutput, Taps, Target, causal_rows

PREFILL_CHUNK = 128  # tokens of a prefill pass: bounds the memory of attention scores


def whole_chunks(length: int) -> int:
    """Rounds `length` up to a length that `prefill` takes."""
    chunk = min(PREFILL_CHUNK, length)
    return -(-length // chunk) * chunk


def prefill(
    params: Any,
    tokens: Int[Array, "B P"],
    length: Int[Array, " B"],
    cache: KVCache,
    target: Target,
    taps: Taps,
    hidden: Float[Array, "B P T D"] | None = None,
) -> tuple[ModelOutput, KVCache]:
    """Writes the first `length` of `tokens`, padded to whole chunks, to a cache in chunks.

    The cache is empty, or holds the first tokens of all sequences, equally many; then `hidden` are
    their hidden states, and P has room for a whole chunk behind the last. Only as many chunks run
    as the longest prompt fills, so its length decides the cost, not P. Returns the tapped hidden
    states; never logits or attention, whose size grows with P squared.
    """
    padded = whole_chunks(tokens.shape[1])
    tokens, batch = resized(tokens, padded, axis=1), len(tokens)
    chunk = min(PREFILL_CHUNK, padded)
    taps = replace(taps, attention_heads=(), logits=False)
    shape = (batch, padded, len(taps.hidden_layers), target.config.hidden_size)
    hidden = jnp.zeros(shape, target.dtype(params)) if hidden is None else hidden
    start = cache.length[0]

    def write_chunk(index, carry):
        cache, hidden = carry
        at = start + index * chunk
        part = lax.dynamic_slice_in_dim(tokens, at, chunk, axis=1)
        rows = causal_rows(part, cache.length, jnp.max(length) - at)
        output, cache = target.run(params, rows, cache, taps)
        if output.hidden is not None:
            hidden = lax.dynamic_update_slice_in_dim(hidden, output.hidden, at, axis=1)
        return cache.advance(jnp.full((batch,), chunk)), hidden

    num_chunks = (jnp.max(length) - start + chunk - 1) // chunk
    cache, hidden = lax.fori_loop(0, num_chunks, write_chunk, (cache, hidden))
    output = ModelOutput(logits=None, hidden=hidden if taps.hidden_layers else None)
    return output, replace(cache, length=length)
