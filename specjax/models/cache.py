"""The KV cache: keys and values of the committed text, with room for the tokens of one round.

A round writes its nodes as *scratch* behind the committed part; `keep` then moves those of the
accepted path to the front of the scratch and commits them. The next round overwrites the rest.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from specjax.core.pytree import pytree
from specjax.models.config import TransformerConfig
from specjax.models.native import keep_slots

ALIGNMENT = 128  # slots: GPUs and TPUs copy keys and values that are not a multiple of it


def align(num_slots: int) -> int:
    """Rounds a number of slots up to a multiple of `ALIGNMENT`."""
    return -(-num_slots // ALIGNMENT) * ALIGNMENT


@pytree
class KVCache:
    """Keys and values, one array per layer: restacking layers every step would copy the cache.

    S: slots (committed and scratch), K: key-value heads, D: width of a head.
    """

    keys: tuple[Float[Array, "B K S D"], ...]
    values: tuple[Float[Array, "B K S D"], ...]
    positions: Int[Array, "B S"]  # of the token in each slot
    length: Int[Array, " B"]  # committed tokens
    prompt_length: Int[Array, " B"]  # used only by dynamic RoPE and LongRoPE

    @classmethod
    def create(
        cls,
        config: TransformerConfig,
        batch: int,
        num_slots: int,
        dtype: DTypeLike = jnp.float32,
        prompt_length: Int[Array, " B"] | int | None = None,
    ) -> "KVCache":
        """Returns an empty cache for `batch` sequences with `num_slots` slots each."""
        shape = (batch, config.num_key_value_heads, num_slots, config.head_dim)
        layers = range(config.num_hidden_layers)
        return cls(
            keys=tuple(jnp.zeros(shape, dtype) for _ in layers),
            values=tuple(jnp.zeros(shape, dtype) for _ in layers),
            positions=jnp.zeros((batch, num_slots), jnp.int32),
            length=jnp.zeros((batch,), jnp.int32),
            prompt_length=jnp.full(
                (batch,), num_slots if prompt_length is None else prompt_length, jnp.int32
            ),
        )

    @property
    def num_slots(self) -> int:
        return self.positions.shape[1]

    def visible_slots(self, visible: Bool[Array, "B Q C"]) -> Bool[Array, "B Q S"]:
        """Returns the slots that each token sees: all committed ones, and scratch by `visible`."""
        batch, count, _ = visible.shape
        committed = jnp.arange(self.num_slots)[None, :] < self.length[:, None]
        everywhere = jnp.broadcast_to(committed[:, None, :], (batch, count, self.num_slots))
        return write_slots(everywhere, visible, self.length, axis=2)

    def keep(
        self,
        path: Int[Array, "B P"],
        count: Int[Array, " B"],
        num_rows: int,
        is_native: bool = False,
    ) -> "KVCache":
        """Commits `count` scratch slots of each sequence: slot `path[b, i]` moves to slot i.

        Paths ascend, since parents stand before their children. Entries from `count` on are
        ignored, but must also be less than `num_rows`, the number of scratch slots. With
        `is_native` a kernel moves them, as is right for passes of packed weights.
        """

        def compact(buffer: Float[Array, "B K S D"]) -> Float[Array, "B K S D"]:
            scratch = read_slots(buffer, self.length, num_rows, axis=2)
            rows = jnp.take_along_axis(scratch, path[:, None, :, None], axis=2)
            return write_slots(buffer, rows, self.length, axis=2)

        scratch = read_slots(self.positions, self.length, num_rows, axis=1)
        moved = jnp.take_along_axis(scratch, path, axis=1)
        caches = [*self.keys, *self.values]
        if is_native:
            caches = keep_slots(caches, path, self.length, count)
        else:
            caches = [compact(cache) for cache in caches]
        return replace(
            self,
            keys=tuple(caches[: len(self.keys)]),
            values=tuple(caches[len(self.keys) :]),
            positions=write_slots(self.positions, moved, self.length, axis=1),
            length=self.length + count,
        )

    def with_slots(self, num_slots: int) -> "KVCache":
        """Returns the cache with room for another number of slots; the last are cut off."""
        return replace(
            self,
            keys=tuple(resized(keys, num_slots, axis=2) for keys in self.keys),
            values=tuple(resized(values, num_slots, axis=2) for values in self.values),
            positions=resized(self.positions, num_slots, axis=1),
        )

    def advance(self, count: Int[Array, " B"]) -> "KVCache":
        """Commits the first `count` scratch slots in place: a chain needs no move."""
        return replace(self, length=self.length + count)


def resized(buffer: Array, size: int, axis: int) -> Array:
    """Cuts `buffer` along `axis`, or pads it with zeros."""
    change = size - buffer.shape[axis]  # a negative one cuts
    edges = [(0, change if dim == axis else 0, 0) for dim in range(buffer.ndim)]
    return lax.pad(buffer, jnp.zeros((), buffer.dtype), edges) if change else buffer


def read_slots(buffer: Array, start: Int[Array, " B"], count: int, axis: int) -> Array:
    """Returns `count` slots of `buffer` along `axis`, from slot `start[b]` of sequence b."""
    if buffer.shape[0] == 1:
        return lax.dynamic_slice_in_dim(buffer, start[0], count, axis)
    of_text = partial(lax.dynamic_slice_in_dim, slice_size=count, axis=axis - 1)
    return jax.vmap(of_text)(buffer, start)


def write_slots(buffer: Array, rows: Array, start: Int[Array, " B"], axis: int) -> Array:
    """Writes `rows` to `buffer` along `axis`, starting at slot `start[b]` of sequence b.

    They must fit behind `start`: XLA would silently shift the write.
    """
    rows = rows.astype(buffer.dtype)
    if buffer.shape[axis] == rows.shape[axis]:  # training, and passes over whole sequences
        return rows
    if buffer.shape[0] > 1:  # the batched form becomes a scatter
        return jax.vmap(partial(lax.dynamic_update_slice_in_dim, axis=axis - 1))(
            buffer, rows, start
        )

    def at_once(buffer, rows, start):
        return lax.dynamic_update_slice_in_dim(buffer, rows, start[0], axis)

    def by_head(buffer, rows, start):
        write = jax.vmap(partial(lax.dynamic_update_slice_in_dim, axis=axis - 2))
        return write(buffer[0], rows[0], jnp.repeat(start, buffer.shape[1]))[None]

    if buffer.ndim < 4 or axis != 2:
        return at_once(buffer, rows, start)
    # On CPU, XLA fuses a plain update twice, into the cache that the loop carries and into the
    # reshape that attention reads, and so copies every layer several times per round. A scatter
    # of one slice per head stays in place.
    return lax.platform_dependent(buffer, rows, start, cpu=by_head, default=at_once)
