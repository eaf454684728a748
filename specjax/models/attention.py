"""Attention over the slots of a cache, at once or in blocks; scores and softmax in float32."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.models.products import FULL_PRECISION

QUERY_BLOCK = 512  # tokens of a long text whose attention scores exist at a time
KEY_BLOCK = 2048  # slots of a long cache that are read at a time
HIDDEN_SCORE = float(jnp.finfo(jnp.float32).min)  # softmax makes it 0
einsum = partial(jnp.einsum, precision=FULL_PRECISION, preferred_element_type=jnp.float32)


def soft_cap(x: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """Bounds `x` smoothly to (-cap, cap); None leaves it as it is."""
    return x if cap is None else jnp.tanh(x / cap) * cap


def has_blocks(num_rows: int) -> bool:
    """Whether the attention of `num_rows` queries is computed in blocks."""
    return num_rows > QUERY_BLOCK and num_rows % QUERY_BLOCK == 0


def has_slot_blocks(num_slots: int) -> bool:
    """Whether prefill reads `num_slots` slots in blocks."""
    return num_slots > KEY_BLOCK


def in_blocks(attention: Callable[..., Any], *rows: tuple[Any, int]) -> Any:
    """Computes attention block by block of queries: `[A, T, T]` never exists.

    `attention` maps the parts of a block to arrays `[B, A, Q, ...]`; `rows` are arrays of all
    queries, each with the axis of the queries. The gradients compute each block again.
    """

    def split(part: Array, axis: int) -> Array:
        shape = (*part.shape[:axis], -1, QUERY_BLOCK, *part.shape[axis + 1 :])
        return jnp.moveaxis(part.reshape(shape), axis, 0)

    blocks = [jax.tree.map(partial(split, axis=axis), part) for part, axis in rows]
    results = lax.map(jax.checkpoint(lambda parts: attention(*parts)), blocks)

    def joined(part: Array) -> Array:
        return jnp.moveaxis(part, 0, 2).reshape(*part.shape[1:3], -1, *part.shape[4:])

    return jax.tree.map(joined, results)


def attend(
    query: Float[Array, "B A Q H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S H"],
    visible: Bool[Array, "B Q S"],
    scale: float | None = None,
    softcap: float | None = None,
    in_any_order: bool = False,
) -> tuple[Float[Array, "B A Q H"], Float[Array, "B A Q S"]]:
    """Computes attention, softmax in float32; query head a reads key-value head `a // (A / K)`.

    Scores are multiplied by `scale`, by default `H**-0.5`, and bounded by `softcap`. Those of long
    texts are computed in blocks. With `in_any_order` a GPU sums over slots in float64, so that the
    order of the slots hardly ever shows.
    """
    batch, heads, count, width = query.shape
    if has_blocks(count):

        def attend_block(query, visible):
            return attend(query, keys, values, visible, scale, softcap, in_any_order)

        return in_blocks(attend_block, (query, 2), (visible, 1))
    groups, num_slots = keys.shape[1], keys.shape[2]
    # The heads of a group share one product: (A/K * Q) rows times that group's keys.
    grouped = query.astype(jnp.promote_types(query.dtype, keys.dtype))
    grouped = grouped.reshape(batch, groups, heads // groups * count, width)
    scores = _scores(grouped, keys)
    scores = scores.reshape(batch, heads, count, num_slots) * (scale or width**-0.5)
    scores = soft_cap(scores, softcap)
    scores = jnp.where(visible[:, None], scores, HIDDEN_SCORE)
    if in_any_order:
        wide = dict.fromkeys(("cuda", "rocm"), _mixed_in_float64)
        mixed, weights = lax.platform_dependent(scores, values, default=_softmax_mixed, **wide)
    else:
        mixed, weights = _softmax_mixed(scores, values)
    return mixed.reshape(batch, heads, count, width), weights


def _softmax_mixed(
    scores: Float[Array, "B A Q S"], values: Float[Array, "B K S H"]
) -> tuple[Float[Array, "B K M H"], Float[Array, "B A Q S"]]:
    weights = jax.nn.softmax(scores)
    shared = weights.astype(values.dtype).reshape(*values.shape[:2], -1, scores.shape[-1])
    return _mixed(shared, values), weights


def _mixed_in_float64(
    scores: Float[Array, "B A Q S"], values: Float[Array, "B K S H"]
) -> tuple[Float[Array, "B K M H"], Float[Array, "B A Q S"]]:
    raised = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    with jax.enable_x64(True):
        sums = jnp.sum(raised, axis=-1, keepdims=True, dtype=jnp.float64)
        weights = raised / lax.convert_element_type(sums, jnp.float32)
        shared = weights.reshape(*values.shape[:2], -1, scores.shape[-1])
        wide = (lax.convert_element_type(part, jnp.float64) for part in (shared, values))
        mixed = lax.convert_element_type(_mixed(*wide), jnp.float32)
    return mixed, weights


def _scores(query: Float[Array, "B K M H"], keys: Float[Array, "B K S H"]) -> Array:
    return einsum("bkmh,bksh->bkms", query, keys)


def _mixed(weights: Float[Array, "B K M S"], values: Float[Array, "B K S H"]) -> Array:
    widest = jnp.promote_types(values.dtype, jnp.float32)
    return einsum("bkms,bksh->bkmh", weights, values, preferred_element_type=widest)


def attend_to_blocks(
    query: Float[Array, "B A Q H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S H"],
    visible: Bool[Array, "B Q S"],
    num_slots: Int[Array, ""],
    scale: float | None = None,
    softcap: float | None = None,
) -> Float[Array, "B A Q H"]:
    """Computes `attend`, up to rounding, block by block of slots; it has no gradients.

    There are more than `KEY_BLOCK` slots. Scores of a block stay in fast memory, and blocks beyond
    the first `num_slots` slots, which no query sees, are not read. All blocks have the same size,
    so results depend neither on `num_slots` nor on the number of slots S.
    """
    batch, heads, count, width = query.shape
    if has_blocks(count):

        def attend_block(query, visible):
            return attend_to_blocks(query, keys, values, visible, num_slots, scale, softcap)

        return in_blocks(attend_block, (query, 2), (visible, 1))
    groups, slots = keys.shape[1:3]
    grouped = query.reshape(batch, groups, heads // groups * count, width)
    rows = (batch, groups, heads // groups, count)  # XLA takes twice the time with heads at once

    def add(number, carry):
        top, total, mixed = carry
        first = number * KEY_BLOCK
        start = jnp.minimum(first, slots - KEY_BLOCK)  # the last block overlaps the one before

        def block(part):
            part = lax.dynamic_slice_in_dim(part, start, KEY_BLOCK, axis=2)
            return jnp.roll(part, start - first, axis=2)  # its new slots move to the front

        seen = block(visible) & (jnp.arange(KEY_BLOCK)[None, None] < slots - first)
        scores = _scores(grouped, block(keys)).reshape(*rows, KEY_BLOCK) * (scale or width**-0.5)
        scores = jnp.where(seen[:, None, None], soft_cap(scores, softcap), HIDDEN_SCORE)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_top[..., None])
        shared = weights.astype(values.dtype).reshape(batch, groups, -1, KEY_BLOCK)
        part = _mixed(shared, block(values)).reshape(mixed.shape)
        faded = jnp.exp(top - new_top)
        total = total * faded + jnp.sum(weights, axis=-1)
        return new_top, total, mixed * faded[..., None] + part

    blank = jnp.full(rows, HIDDEN_SCORE), jnp.zeros(rows), jnp.zeros((*rows, width))
    _, total, mixed = lax.fori_loop(0, -(-num_slots // KEY_BLOCK), add, blank)
    return (mixed / total[..., None]).reshape(query.shape)
