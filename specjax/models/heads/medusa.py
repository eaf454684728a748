"""Medusa's heads: each predicts one later token from the target's last feature alone.

A *feature* is the target's hidden state after its final norm. Head d, counted from 1, reads the
feature of token t and predicts token t + 1 + d, which is depth d of the tree if the root is t + 1.
A head is a residual block, `x + silu(W x + b)`, and its own LM head or the target's. Cai et al.
2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
section 2.1.1.

With more than one layer a head applies the same block repeatedly, as in the published code.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from specjax.core.settings import Checked, setting
from specjax.models.config import TransformerConfig
from specjax.models.heads import HeadWeights
from specjax.models.layers import Linear


@dataclass(frozen=True)
class MedusaConfig(Checked):
    """The shape of the heads; vocabulary and hidden size are the target's."""

    hidden_size: int
    vocab_size: int
    num_heads: int = setting(5, at_least=1)
    num_layers: int = setting(1, at_least=1)  # times that a head's block is applied
    has_lm_heads: bool = True  # False: all heads share the target's ("version 2")

    @property
    def num_drafted(self) -> int:
        """The number of tokens that the heads choose from."""
        return self.vocab_size

    @classmethod
    def for_target(cls, target: TransformerConfig, *shape: Any, **named: Any) -> "MedusaConfig":
        """Returns the shape of heads for a target, given the other fields."""
        return cls(target.hidden_size, target.vocab_size, *shape, **named)


class MedusaHeads(nn.Module):
    """All heads of one target; drafting and training use `logits`.

    The params of head d are `blocks_{d - 1}` and `lm_heads_{d - 1}`.
    """

    config: MedusaConfig

    def setup(self):
        config = self.config
        self.blocks = [Linear(config.hidden_size, use_bias=True) for _ in range(config.num_heads)]
        if config.has_lm_heads:
            self.lm_heads = [
                Linear(config.vocab_size, dtype=jnp.float32) for _ in range(config.num_heads)
            ]

    def __call__(self, features: Float[Array, "... D"], depth: int) -> Float[Array, "... O"]:
        """Returns one head's logits (O is V), or the input of the target's LM head (O is D)."""
        block = self.blocks[depth - 1]
        for _ in range(self.config.num_layers):
            features = features + nn.silu(block(features))
        return self.lm_heads[depth - 1](features) if self.config.has_lm_heads else features

    @nn.nowrap
    def logits(
        self, weights: HeadWeights, features: Float[Array, "... D"], depths: Iterable[int]
    ) -> Float[Array, "... K V"]:
        """Returns the float32 logits of K depths, which count from 1; pure.

        `features` are the target's, of the last token before the root. The target's LM head is read
        once for all depths.
        """
        apply = partial(self.apply, {"params": weights.params}, features)
        outputs = jnp.stack([cast(Array, apply(depth)) for depth in depths], axis=-2)
        if self.config.has_lm_heads:
            return outputs
        return weights.target.logits(weights.target_params, outputs)

    @nn.nowrap
    def initialise(
        self,
        key: Key[Array, ""],
        dtype: DTypeLike = jnp.float32,
        lm_head: Float[Array, "V D"] | None = None,
    ) -> dict[str, Any]:
        """Returns initial params: blocks that change nothing, and copies of the target's `lm_head`.

        Every head then starts with the target's prediction of its next token. The published code
        draws the biases at random, which only moves the features away from those the LM head was
        trained on; zero biases still give the blocks nonzero gradients. Without `lm_head`, LM heads
        are random.
        """
        vocab_size, width = self.config.vocab_size, self.config.hidden_size
        params = {}
        for number, head_key in enumerate(jax.random.split(key, self.config.num_heads)):
            weight, bias = jnp.zeros((width, width), dtype), jnp.zeros((width,), dtype)
            params[f"blocks_{number}"] = {"weight": weight, "bias": bias}
            if self.config.has_lm_heads:
                table = lm_head
                if table is None:
                    table = 0.02 * jax.random.normal(head_key, (vocab_size, width))
                params[f"lm_heads_{number}"] = {"weight": jnp.array(table, dtype)}
        return params
