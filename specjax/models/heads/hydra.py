"""Hydra's heads: each predicts one later token from a feature and the tokens drafted before it.

A *feature* is the target's hidden state after its final norm. Head d, counted from 1, reads the
feature of token t and the embeddings of tokens t + 1 to t + d, and predicts token t + 1 + d, which
is depth d of the tree if the root is t + 1. Embeddings are the target's. With a *prefix layer*
(Hydra++) the features first pass through one layer over the whole text. Ankner et al. 2024, "Hydra:
Sequentially-Dependent Draft Heads for Medusa Decoding".

After their first block the heads apply a second one repeatedly, as the published ones do.
"""

from dataclasses import dataclass
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from specjax.core.errors import SpecjaxError
from specjax.core.pytree import cast_floats
from specjax.core.settings import check_fields, setting
from specjax.models.cache import KVCache
from specjax.models.config import TransformerConfig
from specjax.models.heads import HeadWeights
from specjax.models.heads.layered import LayeredConfig, LayeredHead, layers_like
from specjax.models.layers import DecoderLayer, Linear, RMSNorm
from specjax.models.stack import run_layers
from specjax.models.target import QueryRows


@dataclass(frozen=True)
class HydraConfig(LayeredConfig):
    """The shape of the heads; `layers` is the prefix layer, or 0 layers."""

    num_heads: int = setting(4, at_least=1)
    num_layers: int = setting(4, at_least=1)  # blocks that a head applies
    has_lm_heads: bool = True  # False: all heads share the target's

    def __post_init__(self):
        check_fields(self)
        if self.layers.num_hidden_layers > 1:
            raise SpecjaxError(
                f"a Hydra head with {self.layers.num_hidden_layers} prefix layers is not "
                "supported; use 1 or none"
            )

    @classmethod
    def for_target(
        cls, target: TransformerConfig, has_prefix: bool = False, *shape: Any, **named: Any
    ) -> "HydraConfig":
        """Returns heads for a target, given the other fields; a prefix layer has its sizes."""
        return cls(layers_like(target, int(has_prefix)), *shape, **named)

    @property
    def has_prefix(self) -> bool:
        """Whether these are the heads of Hydra++."""
        return self.layers.num_hidden_layers > 0


class FirstBlock(nn.Module):
    """Maps the concatenation of a feature and d embeddings to the width of a feature."""

    width: int

    def setup(self):
        self.linear = Linear(self.width, use_bias=True)
        self.res_connection = Linear(self.width, use_bias=True)

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... D"]:
        return self.res_connection(x) + nn.silu(self.linear(x))


class HydraHeads(LayeredHead):
    """All heads of one target, and their prefix layer.

    `run` is the pass of the prefix layer, with a cache; `logits_at` runs one head. The params of
    head d are `first_blocks_{d - 1}`, `later_blocks_{d - 1}` and `lm_heads_{d - 1}`; those of the
    prefix layer are `layers_0` and `norm`.
    """

    config: HydraConfig

    def setup(self):
        config, width = self.config, self.config.hidden_size
        heads = range(config.num_heads)
        if config.has_prefix:
            self.layers = [DecoderLayer(config.layers)]
            self.norm = RMSNorm(config.layers.rms_norm_eps)
        self.first_blocks = [FirstBlock(width) for _ in heads]
        if config.num_layers > 1:
            self.later_blocks = [Linear(width, use_bias=True) for _ in heads]
        if config.has_lm_heads:
            self.lm_heads = [
                Linear(config.vocab_size, use_bias=True, dtype=jnp.float32) for _ in heads
            ]

    def prefixed(
        self, rows: QueryRows, features: Float[Array, "B Q D"], cache: KVCache
    ) -> tuple[Float[Array, "B Q D"], KVCache]:
        """See `run`."""
        hidden, _, cache = run_layers(self.layers, features, rows, cache)
        return self.norm(hidden[1]), cache

    def read(
        self, depth: int, features: Float[Array, "B F D"], embedded: Float[Array, "B F K D"]
    ) -> Float[Array, "B F O"]:
        """Returns one head's logits (O is V), or the input of the target's LM head (O is D)."""
        tokens = embedded.reshape(*embedded.shape[:2], -1)
        x = self.first_blocks[depth - 1](
            jnp.concatenate([features.astype(tokens.dtype), tokens], axis=-1)
        )
        for _ in range(self.config.num_layers - 1):
            x = x + nn.silu(self.later_blocks[depth - 1](x))
        return self.lm_heads[depth - 1](x) if self.config.has_lm_heads else x

    def __call__(self, rows: QueryRows, embedded: Array, features: Array, cache: KVCache) -> None:
        """Calls everything once, so that Flax creates all params."""
        if self.config.has_prefix:
            self.prefixed(rows, features, cache)
        for depth in range(1, self.config.num_heads + 1):
            self.read(depth, features, jnp.stack([embedded] * depth, axis=2))

    @nn.nowrap
    def run(
        self, weights: HeadWeights, rows: QueryRows, features: Float[Array, "B Q D"], cache: KVCache
    ) -> tuple[Float[Array, "B Q D"], KVCache]:
        """Applies the prefix layer and its norm; returns the features as they are if there is none.

        Pure. The positions of `rows` are slots; slot t holds the feature of token t. Tokens are
        unused.
        """
        if not self.config.has_prefix:
            return features, cache
        inputs = rows, features, cache
        return cast(Any, self.apply({"params": weights.params}, *inputs, method="prefixed"))

    @nn.nowrap
    def logits_at(
        self,
        weights: HeadWeights,
        depth: int,
        features: Float[Array, "B F D"],
        embedded: Float[Array, "B F K D"],
    ) -> Float[Array, "B F V"]:
        """Returns the float32 logits of depth K (from 1), for the children of F nodes; pure.

        `features` are of the last token before the root, as `run` returned them; `embedded` are the
        target's embeddings of the tokens from the root to each node.
        """
        inputs = depth, features, embedded
        output = cast(Array, self.apply({"params": weights.params}, *inputs, method="read"))
        if self.config.has_lm_heads:
            return output
        return weights.target.logits(weights.target_params, output)

    @nn.nowrap
    def initialise(
        self,
        key: Key[Array, ""],
        dtype: DTypeLike = jnp.float32,
        lm_head: Float[Array, "V D"] | None = None,
    ) -> dict[str, Any]:
        """Returns initial params: blocks that pass the feature on, and copies of `lm_head`.

        Every head then starts with the target's prediction of its next token, plus a little of the
        embeddings. The published code draws all of `res_connection` at random, so its LM heads
        start with features they were not trained on. `lm_head` is the target's; without it LM heads
        are random. Their biases are 0.
        """
        width = self.config.hidden_size
        params = super().initialise(key)
        for number in range(self.config.num_heads):
            first = params[f"first_blocks_{number}"]
            first["linear"] = jax.tree.map(jnp.zeros_like, first["linear"])
            skip = first["res_connection"]
            skip["weight"] = skip["weight"].at[:, :width].set(jnp.eye(width))
            if later := params.get(f"later_blocks_{number}"):
                params[f"later_blocks_{number}"] = jax.tree.map(jnp.zeros_like, later)
            if lm_head is not None and self.config.has_lm_heads:
                params[f"lm_heads_{number}"]["weight"] = jnp.array(lm_head)
        return cast_floats(params, dtype)
