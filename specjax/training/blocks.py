"""Sums losses over the slots of a batch in blocks, without a whole `[B, T, V]` in memory.

The gradient of a block is computed together with its loss, and kept in place of the logits: it has
the width of a feature, not of the vocabulary. Logits are therefore never computed twice.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

# Slots of a batch whose logits exist at a time. With a vocabulary of 128k such an array is 0.3 GB,
# and one read of the LM head still serves enough tokens to be compute-bound.
BLOCK_SLOTS = 512

SlotValues = dict[str, Array]  # `[B, T]` each, by name
Sums = PyTree[Float[Array, ""]]
# Trained params, inputs and fixed arrays of a block -> its loss, and further sums.
BlockLoss = Callable[[Any, Any, Any], tuple[Float[Array, ""], Sums]]


def map_slots(read: Callable[[Any], PyTree[Array]], arrays: PyTree[Array]) -> PyTree[Array]:
    """Computes values of every slot from `arrays`, `[B, T, ...]` each, one block at a time.

    No gradients flow through it.
    """
    length = jax.tree.leaves(arrays)[0].shape[1]
    return _join(lax.map(read, _split(arrays)), length)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_slots(
    loss_of: BlockLoss, trained: PyTree, inputs: PyTree, fixed: PyTree
) -> tuple[Float[Array, ""], Sums]:
    """Sums a loss, and other values, over all blocks of slots.

    Gradients flow from the loss to `trained`, the params that all blocks share, and to `inputs`,
    `[B, T, ...]` each; not to the `fixed` arrays, nor to those that `loss_of` closes over. Slots
    that pad the last block are zero in all.
    """
    sums = lax.map(lambda block: loss_of(trained, *block), _split((inputs, fixed)))
    return jax.tree.map(lambda blocks: jnp.sum(blocks, axis=0), sums)


def _forward(loss_of: BlockLoss, trained: PyTree, inputs: PyTree, fixed: PyTree):
    measure = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)
    length = jax.tree.leaves((inputs, fixed))[0].shape[1]

    def add(totals, block):
        sums, (of_trained, of_inputs) = measure(trained, *block)
        totals = jax.tree.map(lambda a, b: a + b.astype(a.dtype), totals, (sums, of_trained))
        return totals, of_inputs

    blocks = _split((inputs, fixed))
    shapes = jax.eval_shape(loss_of, trained, *jax.tree.map(lambda leaf: leaf[0], blocks))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), (shapes, trained))
    (sums, of_trained), of_inputs = lax.scan(add, zeros, blocks)
    of_trained = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), of_trained, trained)
    return sums, (of_trained, _join(of_inputs, length))


def _backward(_loss_of: BlockLoss, slopes: tuple[PyTree, PyTree], cotangents: Any):
    scale, _ = cotangents
    scaled = jax.tree.map(lambda slope: (scale * slope).astype(slope.dtype), slopes)
    return (*scaled, None)


sum_slots.defvjp(_forward, _backward)


def _split(arrays: PyTree[Array]) -> PyTree[Array]:
    """Cuts `[B, T, ...]` into even blocks, `[N, B, C, ...]`, of `BLOCK_SLOTS` slots at most."""
    batch, length = jax.tree.leaves(arrays)[0].shape[:2]
    num_blocks = -(-length // max(BLOCK_SLOTS // batch, 1))
    size = -(-length // num_blocks)

    def split(values: Array) -> Array:
        rest = values.shape[2:]
        padding = [(0, 0), (0, num_blocks * size - length), *((0, 0) for _ in rest)]
        return jnp.moveaxis(jnp.pad(values, padding).reshape(batch, num_blocks, size, *rest), 1, 0)

    return jax.tree.map(split, arrays)


def _join(blocks: PyTree[Array], length: int) -> PyTree[Array]:
    def join(values: Array) -> Array:
        whole = jnp.moveaxis(values, 0, 1)
        return whole.reshape(whole.shape[0], -1, *whole.shape[3:])[:, :length]

    return jax.tree.map(join, blocks)
