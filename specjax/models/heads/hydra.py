"""Hydra's heads: each predicts one later token from a feature and the tokens drafted before it.

A *feature* is the target's hidden state after its final norm. Head d, counted from 1, reads the
feature of token t and the embeddings of tokens t + 1 to t + d, and predicts token t + 1 + d: with
the root at t + 1 that is depth d of the tree. Embeddings are the target's. With a *prefix layer*
(Hydra++) the features first pass one layer over the whole text. Ankner et al. 2024, "Hydra:
Sequentially-Dependent Draft Heads for Medusa Decoding".

Beyond their first block the published heads repeat one and the same block, and so do these.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from specjax.core.errors import SpecjaxError
from specjax.models.cache import KVCache
from specjax.models.config import TransformerConfig
from specjax.models.heads.eagle import through_layers
from specjax.models.heads.lm_heads import LMHead
from specjax.models.layers import DecoderLayer, Linear, RMSNorm
from specjax.models.target import QueryRows, Target, causal_rows


@dataclass(frozen=True)
class HydraConfig:
    """The shape of the heads; vocabulary and hidden size of `layers` are the target's.

    Raises:
        SpecjaxError: for no heads, no blocks, or more than one prefix layer.
    """

    layers: TransformerConfig  # the prefix layer; of 0 layers without
    num_heads: int = 4
    num_layers: int = 4  # blocks that a head applies
    has_lm_heads: bool = True  # False: the target's LM head reads all of them

    def __post_init__(self):
        for name in ("num_heads", "num_layers"):
            if getattr(self, name) < 1:
                raise SpecjaxError(f"{name} {getattr(self, name)} of Hydra must be at least 1")
        if self.layers.num_hidden_layers > 1:
            raise SpecjaxError(
                f"a Hydra head of {self.layers.num_hidden_layers} prefix layers is not supported; "
                "take 1 or none"
            )

    @classmethod
    def for_target(
        cls,
        target: TransformerConfig,
        has_prefix: bool = False,
        num_heads: int = 4,
        num_layers: int = 4,
        has_lm_heads: bool = True,
    ) -> "HydraConfig":
        """Heads as published; a prefix layer is shaped like the target's, and sees all the text."""
        layers = replace(target, num_hidden_layers=int(has_prefix), sliding_window=None)
        return cls(layers, num_heads, num_layers, has_lm_heads)

    @property
    def hidden_size(self) -> int:
        return self.layers.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.layers.vocab_size

    @property
    def has_prefix(self) -> bool:
        """Whether these are the heads of Hydra++."""
        return self.layers.num_hidden_layers > 0


class FirstBlock(nn.Module):
    """From a feature and d embeddings side by side to one of a feature's width."""

    width: int

    def setup(self):
        self.linear = Linear(self.width, use_bias=True)
        self.res_connection = Linear(self.width, use_bias=True)

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... D"]:
        return self.res_connection(x) + nn.silu(self.linear(x))


class HydraHeads(nn.Module):
    """All heads of one target, and their prefix layer.

    `heads.run` is the pass over the text, with a cache; `heads.logits` is what one head says. Head
    d is `first_blocks_{d - 1}`, `later_blocks_{d - 1}` and `lm_heads_{d - 1}` of the params; the
    prefix layer is `layers_0` and `norm`.
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
            self.lm_heads = [LMHead(config.vocab_size, use_bias=True) for _ in heads]

    def prefixed(
        self, rows: QueryRows, features: Float[Array, "B Q D"], cache: KVCache
    ) -> tuple[Float[Array, "B Q D"], KVCache]:
        """See `run`."""
        features, cache = through_layers(self.layers, features, rows, cache)
        return self.norm(features), cache

    def read(
        self, depth: int, features: Float[Array, "B F D"], embedded: Float[Array, "B F K D"]
    ) -> Float[Array, "B F O"]:
        """The logits of one head, or what the target's LM head is to read: O is V, or D."""
        tokens = embedded.reshape(*embedded.shape[:2], -1)
        x = self.first_blocks[depth - 1](
            jnp.concatenate([features.astype(tokens.dtype), tokens], axis=-1)
        )
        for _ in range(self.config.num_layers - 1):
            x = x + nn.silu(self.later_blocks[depth - 1](x))
        return self.lm_heads[depth - 1](x) if self.config.has_lm_heads else x

    def whole(self, rows: QueryRows, features: Float[Array, "B Q D"], cache: KVCache) -> None:
        """Calls everything once, so that Linen makes all params."""
        if self.config.has_prefix:
            self.prefixed(rows, features, cache)
        for depth in range(1, self.config.num_heads + 1):
            self.read(depth, features, jnp.stack([features] * depth, axis=2))

    @nn.nowrap
    def run(
        self,
        params: Any,
        target: Target,
        target_params: Any,
        rows: QueryRows,
        features: Float[Array, "B Q D"],
        cache: KVCache,
    ) -> tuple[Float[Array, "B Q D"], KVCache]:
        """The prefix layer and its norm; without, the features as they are. Pure.

        Args:
            params: the heads'.
            target: not read; every head's `run` is called in this form.
            target_params: not read, either.
            rows: slots as positions: slot t holds the feature of token t. Tokens are not read.
            features: the target's.
            cache: of the prefix layer; the rows are written as scratch, as `Transformer.run` does.
        """
        del target, target_params
        if not self.config.has_prefix:
            return features, cache
        method = HydraHeads.prefixed
        output, cache = cast(
            Any, self.apply({"params": params}, rows, features, cache, method=method)
        )
        return output, cache

    @nn.nowrap
    def logits(
        self,
        params: Any,
        target: Target,
        target_params: Any,
        depth: int,
        features: Float[Array, "B F D"],
        embedded: Float[Array, "B F K D"],
    ) -> Float[Array, "B F V"]:
        """What the head of one depth says below F nodes each; float32 and pure.

        Args:
            params: the heads'.
            target: whose LM head reads where the heads have none of their own.
            target_params: the target's.
            depth: K, of the tokens to predict; from 1.
            features: of the last token before the root, as `run` returns them.
            embedded: the target's embeddings of the root and the tokens after it, up to each node.
        """
        method = HydraHeads.read
        said = self.apply({"params": params}, depth, features, embedded, method=method)
        said = cast(Array, said)
        return said if self.config.has_lm_heads else target.logits(target_params, said)

    @nn.nowrap
    def initialise(
        self,
        key: Key[Array, ""],
        dtype: DTypeLike = jnp.float32,
        lm_head: Float[Array, "V D"] | None = None,
    ) -> dict[str, Any]:
        """Params to begin with: blocks that hand the feature on, and copies of `lm_head`.

        So every head starts out with what the target says of its next token, and a little of the
        embeddings. The published code draws all of `res_connection` at random, so that LM heads
        begin with features that they were not made for. Without `lm_head`, the target's, LM heads
        are random; their biases are 0.
        """
        width = self.config.hidden_size
        features = jnp.zeros((1, 1, width))
        rows = causal_rows(jnp.zeros((1, 1), jnp.int32), jnp.zeros((1,), jnp.int32))
        cache = KVCache.create(self.config.layers, 1, 1)
        make = jax.jit(partial(self.init, method=HydraHeads.whole))
        params = dict(make(key, rows, features, cache)["params"])
        for number in range(self.config.num_heads):
            first = dict(params[f"first_blocks_{number}"])
            linear, skip = dict(first["linear"]), dict(first["res_connection"])
            linear["weight"] = jnp.zeros_like(linear["weight"])
            skip["weight"] = skip["weight"].at[:, :width].set(jnp.eye(width))
            params[f"first_blocks_{number}"] = {"linear": linear, "res_connection": skip}
            if later := params.get(f"later_blocks_{number}"):
                params[f"later_blocks_{number}"] = jax.tree.map(jnp.zeros_like, later)
            if lm_head is not None and self.config.has_lm_heads:
                own = dict(params[f"lm_heads_{number}"])
                params[f"lm_heads_{number}"] = own | {"weight": jnp.array(lm_head)}
        return jax.tree.map(lambda leaf: leaf.astype(dtype), params)
