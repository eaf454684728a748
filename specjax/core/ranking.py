"""Finds the best of many scores, such as a vocabulary's, faster than `argmax` and `top_k` on a CPU.

The scores are read once, for the maximum of each block of 128; only the best blocks are searched.
Results are those of `jnp.argmax` and `lax.top_k`, whose ties go to the first.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

BLOCK = 128


def best_token(scores: Float[Array, "... V"]) -> Int[Array, "..."]:
    """Returns the index of the highest score, or of the first NaN."""
    return best_score(scores)[1]


def best_score(
    scores: Float[Array, "... V"],
) -> tuple[Float[Array, "..."], Int[Array, "..."]]:
    """Returns the highest score and its index, or those of the first NaN."""
    blocks = _blocks(scores)
    block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)
    inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    return jnp.max(inside, axis=-1), block * BLOCK + jnp.argmax(inside, axis=-1)


def best_tokens(
    scores: Float[Array, "... V"], k: int
) -> tuple[Float[Array, "... K"], Int[Array, "... K"]]:
    """Returns the k highest scores and their indices, the highest first."""
    blocks = _blocks(scores)
    if k >= blocks.shape[-2]:
        best, tokens = lax.top_k(scores, k)
        return best, tokens
    # k blocks with the highest maxima hold the k best; in their order, so that ties go to the first
    chosen = jnp.sort(lax.top_k(jnp.max(blocks, axis=-1), k)[1], axis=-1)
    candidates = jnp.take_along_axis(blocks, chosen[..., None], axis=-2)
    best, place = lax.top_k(candidates.reshape(*scores.shape[:-1], k * BLOCK), k)
    block = jnp.take_along_axis(chosen, place // BLOCK, axis=-1)
    return best, block * BLOCK + place % BLOCK


def _blocks(scores: Float[Array, "... V"]) -> Float[Array, "... N C"]:
    missing = -scores.shape[-1] % BLOCK
    no_change = [(0, 0)] * (scores.ndim - 1)
    padded = jnp.pad(scores, [*no_change, (0, missing)], constant_values=-jnp.inf)
    return padded.reshape(*scores.shape[:-1], -1, BLOCK)
