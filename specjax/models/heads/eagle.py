"""The EAGLE head: one layer that predicts the target's next feature. HASS trains the same head.

A *feature* is the target's hidden state after its final norm. Slot t of the head reads the feature
of token t and the embedding of token t + 1, and predicts the feature of token t + 1, which the
target's LM head turns into the distribution of token t + 2. The embedding and the LM head are the
target's, frozen. RoPE positions are slots. Li et al. 2024, "EAGLE: Speculative Sampling Requires
Rethinking Feature Uncertainty"; Zhang et al. 2025, "Learning Harmonized Representations for
Speculative Sampling" (HASS), section 3.2.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.models.heads.layered import LayeredConfig, LayeredHead
from specjax.models.heads.training_attention import KeysAndValues, text_before, training_attention
from specjax.models.layers import DecoderLayer, Linear


@dataclass(frozen=True)
class EagleConfig(LayeredConfig):
    """The shape of a head."""

    fc_bias: bool = False


def aligned_attention(
    query: Float[Array, "B A T H"], streams: list[KeysAndValues], segments: Int[Array, "B T"]
) -> Float[Array, "B A T H"]:
    """Computes attention of the newest of n streams of keys and values over all of them.

    Slot r sees slot r - i of stream n - 1 - i for i < n - 1, and of stream 0 for all larger i,
    within its own segment. The near part is n - 1 diagonals: see `training_attention`.
    """
    newest, near = len(streams) - 1, []
    for back in range(newest):
        keys, values = (_delayed(part, back) for part in streams[newest - back])
        is_near = segments == _delayed(segments[:, None, :, None], back, -1)[:, 0, :, 0]
        near.append(((keys, values), is_near))
    return training_attention(query, streams[0], text_before(segments, newest), near)


def _delayed(values: Array, back: int, empty: int = 0) -> Array:
    """Shifts `values` by `back` along axis 2; fills the beginning with `empty`."""
    edges = [(0, 0, 0), (0, 0, 0), (back, -back, 0), (0, 0, 0)]  # the end is cut off
    return lax.pad(values, jnp.array(empty, values.dtype), edges)


class EagleHead(LayeredHead):
    """The head: `fc` joins embedding and feature; no norm before the first layer or after the last.

    In training (HASS) slot r of step n stands for the n-th token of a draft: it reads
    `features[r]`, predicted at step n - 1 and shifted by one slot.
    """

    config: EagleConfig
    moves_positions = False  # shifted predictions already are at their slots
    attend_in_training = staticmethod(aligned_attention)

    def setup(self):
        self.add_draft_tokens()
        config = self.config.layers
        self.fc = Linear(config.hidden_size, self.config.fc_bias)
        self.layers = [
            DecoderLayer(config, has_input_norm=number > 0)
            for number in range(config.num_hidden_layers)
        ]
