"""Values of the slots of a batch: what stands later, and what must never be there all at once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

# Slots of each row whose logits are there at a time when they are computed again: with a vocabulary
# of 128k and 8 rows an array of them is 1 GB (of 2048 slots 8 GB), and the LM head, which each
# chunk reads whole, still has 2048 slots to be read for. Chunks are even, and at most as long.
LOGIT_SLOTS = 256

SlotValues = dict[str, Array]  # `[B, T]` each, by name


def later(values: Array, ahead: int = 1) -> Array:
    """What stands `ahead` slots later; the last slots of a row wrap around and never count."""
    return jnp.roll(values, -ahead, axis=1)


def over_slots(
    read: Callable[[Any], SlotValues], arrays: PyTree[Array], recompute: bool
) -> SlotValues:
    """The values of every slot, such as losses, that depend on the logits there.

    With `recompute` no `[B, T, V]` ever exists: `read` is called with one chunk of slots after the
    other, and again for the gradients.

    Args:
        read: from `arrays` of any number of slots to values of each; what it closes over may carry
            gradients too.
        arrays: `[B, T, ...]` each.
        recompute: whether to go by chunks.
    """
    if not recompute:
        return read(arrays)
    batch, length = jax.tree.leaves(arrays)[0].shape[:2]
    num_chunks = -(-length // LOGIT_SLOTS)
    size = -(-length // num_chunks)

    def split(values: Array) -> Array:
        rest = values.shape[2:]
        filling = [(0, 0), (0, num_chunks * size - length), *((0, 0) for _ in rest)]
        filled = jnp.pad(values, filling)
        return jnp.moveaxis(filled.reshape(batch, num_chunks, size, *rest), 1, 0)

    def join(values: Array) -> Array:
        return jnp.moveaxis(values, 0, 1).reshape(batch, -1)[:, :length]

    return jax.tree.map(join, lax.map(jax.checkpoint(read), jax.tree.map(split, arrays)))


def means(values: SlotValues, counts: Bool[Array, "B T"]) -> dict[str, Float[Array, ""]]:
    """Of each value its mean over the slots that count; 0 if there are none."""
    num_counted = jnp.maximum(jnp.sum(counts), 1)
    return {
        name: jnp.sum(jnp.where(counts, value, 0.0)) / num_counted for name, value in values.items()
    }
