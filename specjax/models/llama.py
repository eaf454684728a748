"""Linen Llama: rows, cache and taps in; ModelOutput and cache out.

Notable choices: weights are `[out, in]` as Hugging Face stores them (import is a rename, and a few
rows at a time run faster on CPU); layers are unrolled (a scan would slice, and copy, stacked
weights at every step); products take the dtype of the weights, while norms, softmax and logits are
float32; float32 products run at full precision on every device, because a lossless promise cannot
survive TF32 rounding that depends on the number of rows.
"""

from dataclasses import replace
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.models.cache import KVCache, write_slots
from specjax.models.config import LlamaConfig
from specjax.models.outputs import ModelOutput, Taps
from specjax.models.rows import QueryRows

FULL_PRECISION = lax.Precision.HIGHEST
Rotation = tuple[Float[Array, "B 1 Q H"], Float[Array, "B 1 Q H"]]  # cosine and sine
_initial = nn.initializers.normal(0.02)


class Linear(nn.Module):
    """`x @ weight.T + bias` with `weight [out, in]`."""

    features: int
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        weight = self.param("weight", _initial, (self.features, x.shape[-1]))
        y = project(x, weight, weight.dtype)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,))
            y = y + jnp.broadcast_to(bias, y.shape)
        return y


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    epsilon: float

    @nn.compact
    def __call__(self, x: Float[Array, "B Q D"]) -> Float[Array, "B Q D"]:
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + self.epsilon)
        return jnp.broadcast_to(weight, x.shape) * wide.astype(weight.dtype)


class Embedding(nn.Module):
    """Token table `weight [V, D]`, which may also serve as the LM head."""

    config: LlamaConfig

    @nn.compact
    def __call__(self) -> Float[Array, "V D"]:
        return self.param("weight", _initial, (self.config.vocab_size, self.config.hidden_size))


class Attention(nn.Module):
    """Grouped-query attention over the slots of one layer's cache."""

    config: LlamaConfig

    def setup(self):
        config, bias = self.config, self.config.attention_bias
        groups = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(config.num_attention_heads * config.head_dim, bias)
        self.k_proj = Linear(groups, bias)
        self.v_proj = Linear(groups, bias)
        self.o_proj = Linear(config.hidden_size, bias)

    def query_key_value(
        self, x: Float[Array, "B Q D"], rotation: Rotation
    ) -> tuple[Float[Array, "B A Q H"], Float[Array, "B K Q H"], Float[Array, "B K Q H"]]:
        """Heads first; query and key are rotated to their positions."""

        def heads_first(y):
            return y.reshape(*y.shape[:2], -1, self.config.head_dim).swapaxes(1, 2)

        query, key, value = (heads_first(of(x)) for of in (self.q_proj, self.k_proj, self.v_proj))
        return rotate(query, rotation), rotate(key, rotation), value

    def merge(self, mixed: Float[Array, "B A Q H"]) -> Float[Array, "B Q D"]:
        """What the heads have gathered, as the layer's output."""
        merged = mixed.swapaxes(1, 2)
        return self.o_proj(merged.reshape(*merged.shape[:2], -1))

    def __call__(
        self,
        x: Float[Array, "B Q D"],
        rotation: Rotation,
        keys: Float[Array, "B K S H"],
        values: Float[Array, "B K S H"],
        start: Int[Array, " B"],
        visible: Bool[Array, "B Q S"],
    ) -> tuple[
        Float[Array, "B Q D"],
        Float[Array, "B A Q S"],
        Float[Array, "B K S H"],
        Float[Array, "B K S H"],
    ]:
        """Returns the rows, the attention of all heads (dead code unless tapped), the new cache."""
        query, key, value = self.query_key_value(x, rotation)
        keys = write_slots(keys, key, start, axis=2)
        values = write_slots(values, value, start, axis=2)
        mixed, weights = attend(query, keys, values, visible)
        return self.merge(mixed), weights, keys, values


class FeedForward(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B Q D"]) -> Float[Array, "B Q D"]:
        width, bias = self.config.intermediate_size, self.config.mlp_bias
        gate = Linear(width, bias, name="gate_proj")(x)
        up = Linear(width, bias, name="up_proj")(x)
        return Linear(x.shape[-1], bias, name="down_proj")(nn.silu(gate) * up)


class DecoderLayer(nn.Module):
    """One pre-norm transformer layer."""

    config: LlamaConfig
    has_input_norm: bool = True  # the first layer of an EAGLE head has none

    def setup(self):
        if self.has_input_norm:
            self.input_layernorm = RMSNorm(self.config.rms_norm_eps)
        self.self_attn = Attention(self.config)
        self.post_attention_layernorm = RMSNorm(self.config.rms_norm_eps)
        self.mlp = FeedForward(self.config)

    def normed(self, x: Float[Array, "B Q D"]) -> Float[Array, "B Q D"]:
        """What attention reads."""
        return self.input_layernorm(x) if self.has_input_norm else x

    def after_attention(
        self, x: Float[Array, "B Q D"], mixed: Float[Array, "B Q D"]
    ) -> Float[Array, "B Q D"]:
        """The rest of the layer, with both residuals."""
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x))

    def __call__(self, x: Float[Array, "B Q D"], rotation, keys, values, start, visible):
        """Returns the rows, the attention of all heads and the layer's new keys and values."""
        mixed, weights, keys, values = self.self_attn(
            self.normed(x), rotation, keys, values, start, visible
        )
        return self.after_attention(x, mixed), weights, keys, values


class Llama(nn.Module):
    """The target: embedding, layers, final norm, LM head.

    `model.run(params, rows, cache, taps)` writes the rows as scratch behind
    `cache.length` and does not advance it; `KVCache.keep` does.
    """

    config: LlamaConfig

    @nn.compact
    def __call__(
        self, rows: QueryRows, cache: KVCache, taps: Taps = Taps()
    ) -> tuple[ModelOutput, KVCache]:
        config = self.config
        start = cache.length + (rows.visible.shape[2] - rows.tokens.shape[1])
        positions = write_slots(cache.positions, rows.positions, start, axis=1)
        visible = cache.visible_slots(rows.visible)
        if config.sliding_window is not None:
            distance = rows.positions[:, :, None] - positions[:, None, :]
            visible = visible & (distance < config.sliding_window)
        rotation = rotation_of(rows.positions, config, cache.text_length)
        table = Embedding(config, name="embed_tokens")()
        x = table[rows.tokens]
        hidden, attention, keys, values = [x], {}, [], []
        for layer in range(config.num_hidden_layers):
            x, weights, layer_keys, layer_values = DecoderLayer(config, name=f"layers_{layer}")(
                x, rotation, cache.keys[layer], cache.values[layer], start, visible
            )
            hidden.append(x)
            attention[layer] = weights
            keys.append(layer_keys)
            values.append(layer_values)
        hidden[-1] = x = RMSNorm(config.rms_norm_eps, name="norm")(x)
        logits = None
        if taps.logits or self.is_initializing():
            logits = self._logits(x, table)
        picked = [attention[layer][:, head] for layer, head in taps.attention_heads]
        output = ModelOutput(
            logits=logits,
            hidden=_stack([hidden[layer] for layer in taps.hidden_layers], axis=2),
            attention=_stack(picked, axis=1),
        )
        new_cache = replace(cache, keys=tuple(keys), values=tuple(values), positions=positions)
        return output, new_cache

    def _logits(self, x: Float[Array, "B Q D"], table: Float[Array, "V D"]):
        if not self.config.tie_word_embeddings:
            table = Embedding(self.config, name="lm_head")()
        return project(x, table, jnp.float32)

    @nn.nowrap
    def run(
        self, params: Any, rows: QueryRows, cache: KVCache, taps: Taps = Taps()
    ) -> tuple[ModelOutput, KVCache]:
        """One pass with these params; pure. See the class."""
        output, cache = cast(Any, self.apply({"params": params}, rows, cache, taps))
        return output, cache

    @nn.nowrap
    def logits(self, params: Any, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """What the LM head says, float32, to hidden states after the final norm."""
        table = "embed_tokens" if self.config.tie_word_embeddings else "lm_head"
        return project(x, params[table]["weight"], jnp.float32)

    @nn.nowrap
    def initialise(self, key: Key[Array, ""], dtype: DTypeLike = jnp.float32) -> dict:
        """Random params of this model: a nested dict with Hugging Face's names."""
        one = jnp.zeros((1, 1), jnp.int32)
        rows = QueryRows(one, one, jnp.ones((1, 1, 1), bool))
        cache = KVCache.create(self.config, 1, 1)
        params = jax.jit(self.init)(key, rows, cache)["params"]
        return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def project(
    x: Float[Array, "... I"], weight: Float[Array, "O I"], dtype: DTypeLike
) -> Float[Array, "... O"]:
    """`x @ weight.T`, returned as `dtype`."""
    return lax.dot_general(
        x.astype(weight.dtype),
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=FULL_PRECISION,
        preferred_element_type=dtype,
    )


def rotation_of(
    positions: Int[Array, "B Q"], config: LlamaConfig, text_length: Int[Array, " B"]
) -> Rotation:
    """Cosine and sine of each row's rotary angles, float32, the same for all heads."""
    frequencies = config.rope.inverse_frequencies(
        config.head_dim, config.max_position_embeddings, text_length
    )
    angles = positions[:, None, :, None].astype(jnp.float32) * frequencies[:, None, None, :]
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "B N Q H"], rotation: Rotation) -> Float[Array, "B N Q H"]:
    """Rotary embedding in the half-split layout: pair i is (x[i], x[i + H/2])."""
    cosine, sine = (part.astype(x.dtype) for part in rotation)
    first, second = jnp.split(x, 2, axis=-1)
    return x * cosine + jnp.concatenate([-second, first], axis=-1) * sine


def attend(
    query: Float[Array, "B A Q H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S H"],
    visible: Bool[Array, "B Q S"],
) -> tuple[Float[Array, "B A Q H"], Float[Array, "B A Q S"]]:
    """Softmax attention; query head a reads key-value head `a // (A / K)`. Softmax in float32."""
    batch, heads, count, width = query.shape
    groups, num_slots = keys.shape[1], keys.shape[2]
    # Heads of a group share one product of (A/K * Q) rows with that group's keys.
    grouped = query.reshape(batch, groups, heads // groups * count, width)
    scores = jnp.einsum(
        "bkmh,bksh->bkms",
        grouped,
        keys,
        precision=FULL_PRECISION,
        preferred_element_type=jnp.float32,
    )
    scores = scores.reshape(batch, heads, count, num_slots) * width**-0.5
    scores = jnp.where(visible[:, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1)
    shared = weights.astype(values.dtype).reshape(batch, groups, -1, num_slots)
    mixed = jnp.einsum("bkms,bksh->bkmh", shared, values, precision=FULL_PRECISION)
    return mixed.reshape(batch, heads, count, width), weights


def _stack(parts: list[Array], axis: int) -> Array | None:
    return jnp.stack(parts, axis=axis) if parts else None
