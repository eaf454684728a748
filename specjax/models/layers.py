"""The layers of the transformer: projections, norms, rotary embedding, attention, feed-forward.

Norms, softmax and logits are float32.
"""

from functools import partial
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from specjax.models.attention import attend, attend_to_blocks, has_slot_blocks
from specjax.models.cache import write_slots
from specjax.models.config import Rope, TransformerConfig
from specjax.models.products import project
from specjax.models.quantize import Weight, is_stored

Rotation = tuple[Float[Array, "B 1 Q R"], Float[Array, "B 1 Q R"]]  # cosine and sine
_initial = nn.initializers.normal(0.02)


def weight_of(module: nn.Module, shape: tuple[int, int]) -> Weight:
    """Returns a module's weight, which Flax compares with `shape` if it is an array."""
    if module.has_variable("params", "weight"):
        weight = module.get_variable("params", "weight")
        if is_stored(weight) and weight.shape == shape:
            return weight
    return module.param("weight", _initial, shape)


class Linear(nn.Module):
    """`x @ weight.T + bias` with `weight [out, in]`, as `dtype`; None: that of the weight."""

    features: int
    use_bias: bool = False
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        weight = weight_of(self, (self.features, x.shape[-1]))
        y = project(x, weight, self.dtype or weight.dtype)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,))
            y = y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)
        return y


def _mean(x: Float[Array, "... D"]) -> Float[Array, "... 1"]:
    return jnp.mean(x, axis=-1, keepdims=True)


def _unit_rms(x: Float[Array, "... D"], epsilon: float) -> Float[Array, "... D"]:
    """Divides by the root mean square, in float32."""
    wide = x.astype(jnp.float32)
    return wide * lax.rsqrt(_mean(wide**2) + epsilon)


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    epsilon: float

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],))
        wide = _unit_rms(x, self.epsilon)
        return jnp.broadcast_to(weight, x.shape) * wide.astype(weight.dtype)


class PlusOneRMSNorm(nn.Module):
    """A root-mean-square norm whose weight is added to 1, in float32 to the end."""

    epsilon: float

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        weight = self.param("weight", nn.initializers.zeros, (x.shape[-1],))
        wide = _unit_rms(x, self.epsilon)
        scale = 1 + weight.astype(jnp.float32)
        return (jnp.broadcast_to(scale, x.shape) * wide).astype(weight.dtype)


class LayerNorm(nn.Module):
    """A layer norm with bias, computed in float32."""

    epsilon: float

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        wide = _unit_rms(wide - _mean(wide), self.epsilon)
        scale, shift = (jnp.broadcast_to(part, x.shape) for part in (weight, bias))
        return (scale.astype(jnp.float32) * wide + shift).astype(weight.dtype)


NORMS = {"rms": RMSNorm, "rms_plus_one": PlusOneRMSNorm, "layer": LayerNorm}


def norm_of(config: TransformerConfig, name: str | None = None) -> nn.Module:
    """Returns a norm of the kind that the model has."""
    return NORMS[config.variant.norm](config.rms_norm_eps, name=name)


def _gelu(x: Float[Array, "..."], approximate: bool) -> Float[Array, "..."]:
    return jax.nn.gelu(x.astype(jnp.float32), approximate).astype(x.dtype)


ACTIVATIONS = {
    "silu": nn.silu,
    "gelu": partial(_gelu, approximate=False),
    "gelu_pytorch_tanh": partial(_gelu, approximate=True),
}


class Embedding(nn.Module):
    """The token table, a `Weight [V, D]`; tied models also use it as the LM head."""

    config: TransformerConfig

    @nn.compact
    def __call__(self) -> Any:
        return weight_of(self, (self.config.vocab_size, self.config.hidden_size))


class Attention(nn.Module):
    """Grouped-query attention over the slots of one layer's cache."""

    config: TransformerConfig

    def setup(self):
        config, bias = self.config, self.config.attention_bias
        groups = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(config.num_attention_heads * config.head_dim, bias)
        self.k_proj = Linear(groups, bias)
        self.v_proj = Linear(groups, bias)
        self.o_proj = Linear(config.hidden_size, bias and config.variant.has_output_bias)
        if config.variant.has_qk_norm:
            self.q_norm, self.k_norm = norm_of(config), norm_of(config)

    def query_key_value(
        self, x: Float[Array, "B Q D"], rotation: Rotation | None
    ) -> tuple[Float[Array, "B A Q H"], Float[Array, "B K Q H"], Float[Array, "B K Q H"]]:
        """Returns query, key and value, heads first; rotates query and key to their positions."""

        def heads_first(y):
            return y.reshape(*y.shape[:2], -1, self.config.head_dim).swapaxes(1, 2)

        query, key, value = (heads_first(of(x)) for of in (self.q_proj, self.k_proj, self.v_proj))
        if self.config.variant.has_qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        if rotation is None:
            return query, key, value
        return rotate(query, rotation), rotate(key, rotation), value

    def merge(self, mixed: Float[Array, "B A Q H"]) -> Float[Array, "B Q D"]:
        """Concatenates the heads and projects them to the hidden size."""
        merged = mixed.swapaxes(1, 2)
        return self.o_proj(merged.reshape(*merged.shape[:2], -1))

    def __call__(
        self,
        x: Float[Array, "B Q I"],
        rotation: Rotation | None,
        keys: Float[Array, "B K S H"],
        values: Float[Array, "B K S H"],
        start: Int[Array, " B"],
        visible: Bool[Array, "B Q S"],
        is_prefill: bool = False,
        in_any_order: bool = False,
    ) -> tuple[
        Float[Array, "B Q D"],
        Float[Array, "B A Q S"] | None,
        Float[Array, "B K S H"],
        Float[Array, "B K S H"],
    ]:
        """Returns the rows, the attention of all heads (dead code unless tapped), the new cache.

        In prefill a long cache is read in blocks, and no attention is returned; `in_any_order` as
        for `attend`.
        """
        query, key, value = self.query_key_value(x, rotation)
        keys = write_slots(keys, key, start, axis=2)
        # Weight 0 times NaN is NaN, and a rejected node must not reach others.
        kept = value if is_prefill else jnp.nan_to_num(value)
        values = write_slots(values, kept, start, axis=2)
        variant = self.config.variant
        scalar, softcap = variant.query_pre_attn_scalar, variant.attn_logit_softcapping
        scale = None if scalar is None else scalar**-0.5
        if is_prefill and has_slot_blocks(keys.shape[2]):
            num_slots = jnp.max(start) + query.shape[2]
            mixed = attend_to_blocks(query, keys, values, visible, num_slots, scale, softcap)
            return self.merge(mixed), None, keys, values
        mixed, weights = attend(query, keys, values, visible, scale, softcap, in_any_order)
        if not is_prefill and value.dtype == jnp.float16:
            # A value can overflow where the residual does not, so the node's own logits are marked.
            # Wider dtypes overflow in the residual as well.
            is_finite = jnp.isfinite(value).repeat(mixed.shape[1] // value.shape[1], axis=1)
            mixed = jnp.where(is_finite, mixed, jnp.nan)
        return self.merge(mixed), weights, keys, values


class FeedForward(nn.Module):
    """`down(act(gate(x)) * up(x))`, or `down(act(up(x)))` without a gate."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B Q D"]) -> Float[Array, "B Q D"]:
        width, bias = self.config.intermediate_size, self.config.mlp_bias
        activation = ACTIVATIONS[self.config.variant.hidden_act]
        if self.config.variant.has_gate:
            gate = Linear(width, bias, name="gate_proj")(x)
            up = Linear(width, bias, name="up_proj")(x)
            inner = activation(gate) * up
        else:
            inner = activation(Linear(width, bias, name="up_proj")(x))
        return Linear(x.shape[-1], bias, name="down_proj")(inner)


class DecoderLayer(nn.Module):
    """One pre-norm transformer layer."""

    config: TransformerConfig
    has_input_norm: bool = True  # the first layer of an EAGLE head has none
    is_plainly_normed: ClassVar[bool] = True  # `normed` applies at most `input_layernorm`

    def setup(self):
        if self.has_input_norm:
            self.input_layernorm = norm_of(self.config)
        self.self_attn = Attention(self.config)
        self.post_attention_layernorm = norm_of(self.config)
        self.mlp = FeedForward(self.config)
        if self.config.variant.has_post_norms:
            self.attention_output_norm = norm_of(self.config)
            self.mlp_output_norm = norm_of(self.config)

    def normed(self, x: Float[Array, "B Q D"]) -> Float[Array, "B Q D"]:
        """Returns the rows after the input norm, if the layer has one."""
        return self.input_layernorm(x) if self.has_input_norm else x

    def residual(self, x: Float[Array, "B Q E"]) -> Float[Array, "B Q D"]:
        """Returns what the residual connections pass on of the rows."""
        return x

    def after_attention(
        self, x: Float[Array, "B Q E"], mixed: Float[Array, "B Q D"]
    ) -> Float[Array, "B Q D"]:
        """Applies the rest of the layer, with both residuals."""
        x = self.residual(x)
        if self.config.variant.has_post_norms:
            x = x + self.attention_output_norm(mixed)
            return x + self.mlp_output_norm(self.mlp(self.post_attention_layernorm(x)))
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x))

    def __call__(self, x: Float[Array, "B Q D"], *arguments: Any, **options: Any):
        """Returns the rows, the attention of all heads and the layer's new keys and values.

        The further arguments are those of `Attention`.
        """
        mixed, weights, keys, values = self.self_attn(self.normed(x), *arguments, **options)
        return self.after_attention(x, mixed), weights, keys, values


def rotation_of(
    positions: Int[Array, "B Q"],
    config: TransformerConfig,
    prompt_length: Int[Array, " B"],
    rope: Rope | None = None,
) -> Rotation:
    """Returns the cosine and sine of each row's rotary angles, float32, shared by all heads.

    The prompt is read at once and every later token by itself, as in `transformers`, so a rotation
    does not depend on what else a pass reads. `rope` is the config's by default.
    """
    rope = rope or config.rope
    text_length = prompt_length[:, None]
    if rope.rope_type != "longrope":
        text_length = jnp.maximum(text_length, positions + 1)
    frequencies = rope.inverse_frequencies(
        config.head_dim, config.max_position_embeddings, text_length
    )
    angles = positions[:, None, :, None].astype(jnp.float32) * frequencies[:, None]
    angles = jnp.concatenate([angles, angles], axis=-1)
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    if rope.attention_factor != 1.0:
        cosine, sine = cosine * rope.attention_factor, sine * rope.attention_factor
    return cosine, sine


def rotate(x: Float[Array, "B N Q H"], rotation: Rotation) -> Float[Array, "B N Q H"]:
    """Applies rotary embedding in the half-split layout: pair i is (x[i], x[i + R/2]).

    What a head has beyond the width R of the rotation stays as it is.
    """
    cosine, sine = (part.astype(x.dtype) for part in rotation)
    if (width := cosine.shape[-1]) < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :width], rotation), x[..., width:]], axis=-1)
    first, second = jnp.split(x, 2, axis=-1)
    return x * cosine + jnp.concatenate([-second, first], axis=-1) * sine
