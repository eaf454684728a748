"""The decoder of every family: tokens, cache and taps in; ModelOutput and cache out."""

from dataclasses import replace
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from specjax.core.errors import SpecjaxError
from specjax.models.attention import soft_cap
from specjax.models.cache import KVCache
from specjax.models.config import TransformerConfig
from specjax.models.layers import DecoderLayer, Embedding, norm_of
from specjax.models.products import lookup, project
from specjax.models.quantize import Weight
from specjax.models.shapes import shape_mismatches
from specjax.models.stack import run_layers
from specjax.models.target import ModelOutput, QueryRows, Taps, causal_rows


class Transformer(nn.Module):
    """A decoder-only transformer: embedding, layers, final norm, LM head. It is a `Target`.

    `run` writes scratch behind `cache.length`; `KVCache.keep` commits it.

    `cache_dtype` is that of keys and values; None takes that of the weights. With a `padded_width`
    GPUs and TPUs multiply the same shapes whichever method drafts; in 16 bits, passes with logits
    then sum over slots in float64 on GPUs too.
    """

    config: TransformerConfig
    cache_dtype: DTypeLike | None = None
    mesh: Mesh | None = None
    padded_width: int = 0

    @nn.compact
    def __call__(
        self, rows: QueryRows, cache: KVCache, taps: Taps = Taps()
    ) -> tuple[ModelOutput, KVCache]:
        config = self.config
        table = Embedding(config, name="embed_tokens")()
        x = self._embedded(table, rows.tokens)
        if config.variant.has_learned_positions:
            places = replace(config, vocab_size=config.max_position_embeddings)
            x = x + lookup(Embedding(places, name="embed_positions")(), rows.positions)
        layers = [
            DecoderLayer(config, name=f"layers_{number}")
            for number in range(config.num_hidden_layers)
        ]
        norm = norm_of(config, name="norm")
        is_half = jnp.finfo(x.dtype).bits == 16
        in_any_order = bool(self.padded_width) and is_half and taps.logits
        hidden, attention, cache = run_layers(layers, x, rows, cache, taps, norm, in_any_order)
        last = config.num_hidden_layers
        logits = None
        if taps.logits or self.is_initializing():
            if not config.tie_word_embeddings:
                table = Embedding(config, name="lm_head")()
            logits = self._projected(hidden[last], table, rows.count)
        picked = [hidden[layer % (last + 1)] for layer in taps.hidden_layers]
        weights = [attention[head] for head in taps.attention_heads]
        return ModelOutput(logits, _stack(picked, axis=2), _stack(weights, axis=1)), cache

    @nn.nowrap
    def _embedded(self, table: Weight, tokens: Int[Array, "..."]):
        if self.mesh is not None and tokens.size == 1:
            # XLA turns a lookup of one row into a slice, and gathers a whole split table for it.
            embedded = lookup(table, jnp.repeat(tokens, 2, axis=-1))[..., :1, :]
        else:
            embedded = lookup(table, tokens)
        if not self.config.variant.has_scaled_embeddings:
            return embedded
        return embedded * jnp.asarray(self.config.hidden_size**0.5, table.dtype)

    @nn.nowrap
    def _projected(self, x: Float[Array, "... D"], table: Weight, count: Any = None):
        logits = project(x, table, jnp.float32, count)
        return soft_cap(logits, self.config.variant.final_logit_softcapping)

    @nn.nowrap
    def check(self, params: Any) -> None:
        if wrong := shape_mismatches(params, self):
            raise SpecjaxError(
                f"the model's params do not fit it ({wrong}); pass those that were loaded with it"
            )

    @nn.nowrap
    def run(
        self, params: Any, rows: QueryRows, cache: KVCache, taps: Taps = Taps()
    ) -> tuple[ModelOutput, KVCache]:
        return cast(Any, self.apply({"params": params}, rows, cache, taps))

    @nn.nowrap
    def embed(self, params: Any, tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
        return self._embedded(params["embed_tokens"]["weight"], tokens)

    @nn.nowrap
    def logits(
        self, params: Any, hidden: Float[Array, "... D"], lm_head: Weight | None = None
    ) -> Float[Array, "... R"]:
        return self._projected(hidden, self.lm_head(params) if lm_head is None else lm_head)

    @nn.nowrap
    def lm_head(self, params: Any) -> Weight:
        table = "embed_tokens" if self.config.tie_word_embeddings else "lm_head"
        return params[table]["weight"]

    @nn.nowrap
    def dtype(self, params: Any) -> DTypeLike:
        return params["embed_tokens"]["weight"].dtype

    @nn.nowrap
    def new_cache(
        self,
        params: Any,
        batch: int,
        num_slots: int,
        prompt_length: Int[Array, " B"] | int | None = None,
    ) -> KVCache:
        dtype = self.dtype(params) if self.cache_dtype is None else self.cache_dtype
        return KVCache.create(self.config, batch, num_slots, dtype, prompt_length)

    @nn.nowrap
    def with_one_layer(self) -> tuple["Transformer", int]:
        """Returns this model with its first layer alone, and the number of its layers."""
        config = replace(self.config, num_hidden_layers=1, layer_types=self.config.layer_types[:1])
        return self.clone(config=config), self.config.num_hidden_layers

    @nn.nowrap
    def initialise(self, key: Key[Array, ""], dtype: DTypeLike = jnp.float32) -> dict:
        """Returns random params: a nested dict with Hugging Face's names."""
        rows = causal_rows(jnp.zeros((1, 1), jnp.int32), jnp.zeros((1,), jnp.int32))
        cache = KVCache.create(self.config, 1, 1)
        params = jax.jit(self.init)(key, rows, cache)["params"]
        return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def _stack(parts: list[Array], axis: int) -> Array | None:
    return jnp.stack(parts, axis=axis) if parts else None
