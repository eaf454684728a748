"""Attention for training heads whose drafted rows see more than the text.

Each slot sees far slots, as in causal attention, and one row of each of a few other streams: its
own draft. The far part is one product with all slots, the near part one row per slot and stream, so
a pass over T slots costs little more than causal attention over them, and far less than one text
that holds all rows.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.models.attention import HIDDEN_SCORE, einsum, has_blocks, in_blocks
from specjax.models.products import FULL_PRECISION

KeysAndValues = tuple[Float[Array, "B K T H"], Float[Array, "B K T H"]]
OwnRows = tuple[tuple[Float[Array, "B K Q H"], Float[Array, "B K Q H"]], Bool[Array, "B Q"]]


def training_attention(
    query: Float[Array, "B A Q H"],
    far: KeysAndValues,
    is_far: Bool[Array, "B Q T"],
    near: Sequence[OwnRows],
) -> Float[Array, "B A Q H"]:
    """Computes attention of Q slots; query head a reads key-value head `a // (A / K)`.

    Of the `far` keys and values each slot sees those that `is_far` marks; of each stream in `near`
    slot q sees only row q, where the mask is true. Scores of long texts are computed in blocks.
    """
    if has_blocks(query.shape[2]):
        parts, masks = zip(*near, strict=True) if near else ((), ())

        def block(query, is_far, parts, masks):
            return training_attention(query, far, is_far, [*zip(parts, masks, strict=True)])

        return in_blocks(block, (query, 2), (is_far, 1), (parts, 2), (masks, 1))
    batch, heads, _, width = query.shape
    far_keys, far_values = far
    groups, length = far_keys.shape[1:3]
    grouped = query.reshape(batch, groups, heads // groups, -1, width)
    scores = [_masked(einsum("bkgth,bksh->bkgts", grouped, far_keys), is_far)]
    for (keys, _), is_near in near:
        score = einsum("bkgth,bkth->bkgt", grouped, keys)
        scores.append(_masked(score[..., None], is_near[..., None]))
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1) * width**-0.5, axis=-1)
    weights = weights.astype(far_values.dtype)
    mixed = jnp.einsum(
        "bkgts,bksh->bkgth", weights[..., :length], far_values, precision=FULL_PRECISION
    )
    for number, ((_, values), _) in enumerate(near):
        mixed = mixed + weights[..., length + number, None] * values[:, :, None]
    return mixed.reshape(query.shape)


def draft_attention(
    query: Float[Array, "B A T H"], streams: Sequence[KeysAndValues], segments: Int[Array, "B T"]
) -> Float[Array, "B A T H"]:
    """Computes attention of each slot over its text so far in the first stream and its own draft.

    The draft is the slot's own key in each later stream; in the first, slots see themselves too.
    """
    far, *near = streams
    is_near = jnp.ones(segments.shape, bool)
    return training_attention(query, far, text_before(segments), [(kv, is_near) for kv in near])


def text_before(segments: Int[Array, "B T"], min_distance: int = 0) -> Bool[Array, "B T T"]:
    """Returns which slots are in the same text as each slot, `min_distance` or more before it."""
    slots = jnp.arange(segments.shape[1])
    distance = slots[:, None] - slots[None, :]
    is_same = segments[:, :, None] == segments[:, None, :]
    return is_same & (distance >= min_distance)[None]


def longest_text(positions: Int[Array, "B T"]) -> Int[Array, " B"]:
    """Returns the length of each sequence's longest text, on which a rotation may depend."""
    return jnp.max(positions, axis=1) + 1


def _masked(scores: Float[Array, "B K G T S"], visible: Array) -> Float[Array, "B K G T S"]:
    return jnp.where(visible[:, None, None], scores, HIDDEN_SCORE)
