"""What the frozen target says of a batch, on line: its features never touch the disk."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.models.target import QueryRows, Taps, Target


def target_features(
    target: Target,
    params: Any,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"],
) -> Float[Array, "B T D"]:
    """The hidden states behind the final norm, constant to gradients; texts see only themselves.

    Args:
        target: the model.
        params: its weights.
        tokens: rows of one text or of several, one after another.
        positions: of each token within its text.
        segments: the number of the text that each token belongs to.
    """
    batch, length = tokens.shape
    is_same = segments[:, :, None] == segments[:, None, :]
    visible = is_same & jnp.tril(jnp.ones((1, length, length), bool))
    cache = target.new_cache(params, batch, length)
    taps = Taps(hidden_layers=(-1,), logits=False)
    output, _ = target.run(params, QueryRows(tokens, positions, visible), cache, taps)
    assert output.hidden is not None
    return jax.lax.stop_gradient(output.hidden[:, :, 0])
