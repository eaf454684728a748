"""Values and losses of all slots of a batch, computed block by block: no `[B, T, V]` ever exists.

The gradient of a block is computed together with its loss, and kept in place of the logits: it has
the width of a feature, not of the vocabulary. So no logits are computed twice either.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

# Slots of a batch whose logits exist at a time. With a vocabulary of 128k such an array is 0.3 GB,
# and one read of the LM head still serves enough rows to be compute-bound.
BLOCK_SLOTS = 512

SlotValues = dict[str, Array]  # `[B, T]` each, by name
Sums = PyTree[Float[Array, ""]]
# Trained params, inputs and fixed arrays of a block -> its loss, and further sums.
BlockLoss = Callable[[Any, Any, Any], tuple[Float[Array, ""], Sums]]


def map_slots(read: Callable[[Any], SlotValues], arrays: PyTree[Array]) -> SlotValues:
    """Computes values of every slot from `arrays`, `[B, T, ...]` each; for values, not gradients.

    `read` is called with one block of slots after the other.
    """
    length = jax.tree.leaves(arrays)[0].shape[1]
    return _join(lax.map(read, _split(arrays)), length)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_slots(
    loss_of: BlockLoss, trained: PyTree, inputs: PyTree, fixed: PyTree
) -> tuple[Float[Array, ""], Sums]:
    """Sums a loss, and other values, over all blocks of slots.

    Gradients flow to `trained` and `inputs`, from the loss alone.

    Args:
        loss_of: pure; what it closes over gets no gradient.
        trained: params that all blocks share.
        inputs: floats of every slot, `[B, T, ...]` each.
        fixed: further arrays of every slot. Slots that fill up the last block are zero in all.
    """
    return _over_blocks(partial(loss_of, trained), inputs, fixed)


def _forward(loss_of: BlockLoss, trained: PyTree, inputs: PyTree, fixed: PyTree):
    measure = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)
    length = max((leaf.shape[1] for leaf in jax.tree.leaves(inputs)), default=0)

    def add(so_far, block):
        sums, (of_trained, of_inputs) = measure(trained, *block)
        return jax.tree.map(
            lambda a, b: a + b.astype(a.dtype), so_far, (sums, of_trained)
        ), of_inputs

    blocks = _split((inputs, fixed))
    first = jax.tree.map(lambda leaf: leaf[0], blocks)
    shapes = jax.eval_shape(loss_of, trained, *first)
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), (shapes, trained))
    (sums, of_trained), of_inputs = lax.scan(add, empty, blocks)
    of_trained = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), of_trained, trained)
    return sums, (of_trained, _join(of_inputs, length))


def _backward(loss_of: BlockLoss, slopes: tuple[PyTree, PyTree], cotangents: Any):
    del loss_of
    scale, _ = cotangents
    scaled = jax.tree.map(lambda slope: (scale * slope).astype(slope.dtype), slopes)
    return (*scaled, None)


sum_slots.defvjp(_forward, _backward)


def _over_blocks(loss_of: Callable, inputs: PyTree, fixed: PyTree) -> Any:
    parts = lax.map(lambda block: loss_of(*block), _split((inputs, fixed)))
    return jax.tree.map(lambda part: jnp.sum(part, axis=0), parts)


def _split(arrays: PyTree[Array]) -> PyTree[Array]:
    """Cuts `[B, T, ...]` into even blocks, `[N, B, C, ...]`, of `BLOCK_SLOTS` slots at most."""
    batch, length = jax.tree.leaves(arrays)[0].shape[:2]
    num_blocks = -(-length // max(BLOCK_SLOTS // batch, 1))
    size = -(-length // num_blocks)

    def split(values: Array) -> Array:
        rest = values.shape[2:]
        filling = [(0, 0), (0, num_blocks * size - length), *((0, 0) for _ in rest)]
        return jnp.moveaxis(jnp.pad(values, filling).reshape(batch, num_blocks, size, *rest), 1, 0)

    return jax.tree.map(split, arrays)


def _join(blocks: PyTree[Array], length: int) -> PyTree[Array]:
    def join(values: Array) -> Array:
        whole = jnp.moveaxis(values, 0, 1)
        return whole.reshape(whole.shape[0], -1, *whole.shape[3:])[:, :length]

    return jax.tree.map(join, blocks)
