"""LM heads that a head has of its own, and the target's, with which they begin."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.core.errors import SpecjaxError
from specjax.models.config import TransformerConfig
from specjax.models.io.checkpoint import mismatches
from specjax.models.layers import project


class LMHead(nn.Module):
    """A table `weight [V, D]`, and perhaps a `bias [V]`, that read features; float32."""

    vocab_size: int
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
        shape = (self.vocab_size, x.shape[-1])
        weight = self.param("weight", nn.initializers.normal(0.02), shape)
        logits = project(x, weight, jnp.float32)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.vocab_size,))
            logits = logits + jnp.broadcast_to(bias.astype(jnp.float32), logits.shape)
        return logits


def lm_head_of(target: TransformerConfig, target_params: Mapping[str, Any]) -> Float[Array, "V D"]:
    """The table with which a target reads its features."""
    table = "embed_tokens" if target.tie_word_embeddings else "lm_head"
    return target_params[table]["weight"]


def lm_head_to_save(
    folder: Path, reader: str, target: TransformerConfig, target_params: Mapping[str, Any] | None
) -> Float[Array, "V D"]:
    """The target's table for a file of heads that have none of their own.

    Args:
        folder: that is to hold the file, for the message.
        reader: who asks for LM heads in it, for the message.
        target: of the heads.
        target_params: the target's, if they were given.

    Raises:
        SpecjaxError: if they were not, or are those of another target.
    """
    if target_params is None:
        raise SpecjaxError(
            f"cannot save {folder}: these heads use the target's LM head, which {reader} reads "
            "from their file; give the target's params, too"
        )
    table = lm_head_of(target, target_params)
    expected = {"lm_head": (target.vocab_size, target.hidden_size)}
    if complaints := mismatches({"lm_head": tuple(table.shape)}, expected):
        raise SpecjaxError(f"cannot save {folder}: {complaints}; give the target of these heads")
    return table
