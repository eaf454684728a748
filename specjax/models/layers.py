"""The layers of the transformer: projections, norms, rotary embedding, attention, feed-forward.

Weights are `[out, in]`, as Hugging Face stores them: loading only renames them, and passes over a
few rows run faster on CPU. Products take inputs of the weights' dtype and accumulate in float32;
norms, softmax and logits are float32, and some sums of 16-bit models are float64 on a CPU. Float32
products run at full precision on every device: TF32 rounding depends on the number of rows, so the
text would depend on it too.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from specjax.models.cache import write_slots
from specjax.models.config import Rope, TransformerConfig
from specjax.models.quantize import QuantizedWeight, Weight, dequantized
from specjax.models.sums import has_16_bits, in_float64, row_mean, total

FULL_PRECISION = lax.Precision.HIGHEST
QUERY_BLOCK = 512  # rows of long texts whose attention scores exist at a time
KEY_BLOCK = 2048  # slots of long caches, likewise
BLOCK_ROWS = 256  # of a quantised weight: a CPU converts so many at a time
Rotation = tuple[Float[Array, "B 1 Q R"], Float[Array, "B 1 Q R"]]  # cosine and sine
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
    """Root-mean-square norm, computed in float32; its sums as in `models.sums`."""

    epsilon: float

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        wide = wide * lax.rsqrt(row_mean(wide**2, weight.dtype) + self.epsilon)
        return jnp.broadcast_to(weight, x.shape) * wide.astype(weight.dtype)


class PlusOneRMSNorm(nn.Module):
    """A root-mean-square norm whose weight is added to 1, in float32 to the end."""

    epsilon: float

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        weight = self.param("weight", nn.initializers.zeros, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        wide = wide * lax.rsqrt(row_mean(wide**2, weight.dtype) + self.epsilon)
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
        wide = wide - row_mean(wide, weight.dtype)
        wide = wide * lax.rsqrt(row_mean(wide**2, weight.dtype) + self.epsilon)
        scale, shift = (jnp.broadcast_to(each, x.shape) for each in (weight, bias))
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
        return self.param("weight", _initial, (self.config.vocab_size, self.config.hidden_size))


class LMHead(nn.Module):
    """A drafter's own LM head: `weight [V, D]`, perhaps `bias [V]`; float32 logits."""

    vocab_size: int
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
        weight = self.param("weight", _initial, (self.vocab_size, x.shape[-1]))
        logits = project(x, weight, jnp.float32)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.vocab_size,))
            logits = logits + jnp.broadcast_to(bias.astype(jnp.float32), logits.shape)
        return logits


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
        sums_in_float64: bool = False,
    ) -> tuple[
        Float[Array, "B Q D"],
        Float[Array, "B A Q S"] | None,
        Float[Array, "B K S H"],
        Float[Array, "B K S H"],
    ]:
        """Returns the rows, the attention of all heads (dead code unless tapped), the new cache.

        In prefill a long cache is read in blocks, and no attention is returned; `sums_in_float64`
        as for `attend`.
        """
        query, key, value = self.query_key_value(x, rotation)
        keys = write_slots(keys, key, start, axis=2)
        values = write_slots(values, value, start, axis=2)
        variant = self.config.variant
        scalar, softcap = variant.query_pre_attn_scalar, variant.attn_logit_softcapping
        scale = None if scalar is None else scalar**-0.5
        if is_prefill and keys.shape[2] > KEY_BLOCK:
            num_slots = jnp.max(start) + query.shape[2]
            mixed = attend_to_blocks(query, keys, values, visible, num_slots, scale, softcap)
            return self.merge(mixed), None, keys, values
        mixed, weights = attend(query, keys, values, visible, scale, softcap, sums_in_float64)
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

    def after_attention(
        self, x: Float[Array, "B Q D"], mixed: Float[Array, "B Q D"]
    ) -> Float[Array, "B Q D"]:
        """Applies the rest of the layer, with both residuals."""
        if self.config.variant.has_post_norms:
            x = x + self.attention_output_norm(mixed)
            return x + self.mlp_output_norm(self.mlp(self.post_attention_layernorm(x)))
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x))

    def __call__(
        self, x: Float[Array, "B Q D"], rotation, keys, values, start, visible, **how: bool
    ):
        """Returns the rows, the attention of all heads and the layer's new keys and values.

        `how` are `is_prefill` and `sums_in_float64` of `Attention`.
        """
        mixed, weights, keys, values = self.self_attn(
            self.normed(x), rotation, keys, values, start, visible, **how
        )
        return self.after_attention(x, mixed), weights, keys, values


def project(x: Float[Array, "... I"], weight: Weight, dtype: DTypeLike) -> Float[Array, "... O"]:
    """Returns `x @ weight.T` as `dtype`, accumulated in float32.

    16-bit products are written as matrix units want them: two axes each, a float32 result, and no
    fewer than `min_rows`. A CPU computes others up to 100 times slower, and a TPU a single row 3
    times; and with these every row comes out alike, however many there are.
    """
    rows = x.astype(weight.dtype).reshape(-1, x.shape[-1])
    is_float = not isinstance(weight, QuantizedWeight)
    y = _filled_up(_product, rows, weight) if is_float else _quantized_product(rows, weight)
    return y.astype(dtype).reshape(*x.shape[:-1], -1)


def _filled_up(product: Any, rows: Float[Array, "R I"], weight: Weight) -> Float[Array, "R O"]:
    """Multiplies these rows among at least `min_rows`."""
    missing = max(min_rows(weight.dtype) - len(rows), 0)
    return product(jnp.pad(rows, ((0, missing), (0, 0))), weight)[: len(rows)]


@jax.custom_vjp
def _product(rows: Float[Array, "R I"], weight: Float[Array, "O I"]) -> Float[Array, "R O"]:
    return _dot(rows, weight, 1)


def _dot(left: Float[Array, "M C"], right: Array, axis: int) -> Float[Array, "M N"]:
    """Contracts the last axis of `left` with `axis` of `right`; returns float32."""
    return lax.dot_general(
        left,
        right,
        (((1,), (axis,)), ((), ())),
        precision=FULL_PRECISION,
        preferred_element_type=jnp.float32,
    )


def _product_forward(rows: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return _dot(rows, weight, 1), (rows, weight)


def _product_backward(saved: tuple[Array, Array], slope: Array) -> tuple[Array, Array]:
    # JAX's own rule would multiply the float32 slope, and so convert whole 16-bit weights.
    rows, weight = saved
    slope = slope.astype(weight.dtype)
    return _dot(slope, weight, 0).astype(rows.dtype), _dot(slope.T, rows, 0).astype(weight.dtype)


_product.defvjp(_product_forward, _product_backward)


@jax.custom_vjp
def _quantized_product(rows: Float[Array, "R I"], weight: QuantizedWeight) -> Float[Array, "R O"]:
    # Without the barrier XLA would convert all weights once, outside the decoding loop.
    rows, weight = lax.optimization_barrier((rows, weight))
    return lax.platform_dependent(
        rows,
        weight,
        cpu=partial(_filled_up, _blocked_product),
        cuda=_scaled_product,  # which converts the weight within the product of a single row
        default=partial(_filled_up, _scaled_product),
    )


def _scaled_product(rows: Float[Array, "R I"], weight: QuantizedWeight) -> Float[Array, "R O"]:
    if weight.scale.shape[1] > 1:
        return _dot(rows, dequantized(weight), 1)
    return _dot(rows, weight.codes.astype(rows.dtype), 1) * weight.scale.T.astype(jnp.float32)


def _blocked_product(rows: Float[Array, "R I"], weight: QuantizedWeight) -> Float[Array, "R O"]:
    """Converts a few rows of the weight at a time: they stay in the caches of a CPU."""
    outputs, size = weight.shape[0], min(BLOCK_ROWS, weight.shape[0])

    def write(index, y):
        at = jnp.minimum(index * size, outputs - size)
        part = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, at, size), weight)
        return lax.dynamic_update_slice_in_dim(y, _scaled_product(rows, part), at, axis=1)

    blank = jnp.zeros((len(rows), outputs), jnp.float32)
    return lax.fori_loop(0, -(-outputs // size), write, blank)


def _quantized_forward(rows: Array, weight: QuantizedWeight) -> tuple[Array, QuantizedWeight]:
    return _quantized_product(rows, weight), weight


def _quantized_backward(weight: QuantizedWeight, slope: Array) -> tuple[Array, None]:
    slope = slope.astype(weight.dtype)
    return _dot(slope, dequantized(weight), 0).astype(weight.dtype), None


_quantized_product.defvjp(_quantized_forward, _quantized_backward)


def min_rows(dtype: DTypeLike) -> int:
    """Returns the least number of rows that products with weights of this dtype should have."""
    return 8 if has_16_bits(dtype) else 1


def lookup(table: Weight, tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
    """Returns the rows of an embedding table."""
    if isinstance(table, QuantizedWeight):
        return dequantized(table[tokens])
    if table.dtype.itemsize > 2:
        return table[tokens]

    def as_bits(table, tokens):
        # XLA on CPU would convert a whole 16-bit table to float32, and move that out of the loop.
        table, tokens = lax.optimization_barrier((table, tokens))
        rows = lax.bitcast_convert_type(table, jnp.uint16)[tokens]
        return lax.bitcast_convert_type(rows, table.dtype)

    return lax.platform_dependent(table, tokens, cpu=as_bits, default=lambda table, at: table[at])


def soft_cap(x: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """Bounds `x` smoothly to (-cap, cap); None leaves it as it is."""
    return x if cap is None else jnp.tanh(x / cap) * cap


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


def has_blocks(num_rows: int) -> bool:
    """Whether attention of so many query rows is computed in blocks."""
    return num_rows > QUERY_BLOCK and num_rows % QUERY_BLOCK == 0


def in_blocks(attention: Callable[..., Any], *rows: tuple[Any, int]) -> Any:
    """Computes attention for one block of query rows after the other: `[A, T, T]` never exists.

    The gradients compute each block again.

    Args:
        attention: from the rows of a block to arrays `[B, A, Q, ...]`.
        rows: arrays of all query rows, and the axis along which each has them.
    """

    def split(part: Array, axis: int) -> Array:
        shape = (*part.shape[:axis], -1, QUERY_BLOCK, *part.shape[axis + 1 :])
        return jnp.moveaxis(part.reshape(shape), axis, 0)

    blocks = [jax.tree.map(partial(split, axis=axis), part) for part, axis in rows]
    found = lax.map(jax.checkpoint(lambda block: attention(*block)), blocks)
    return jax.tree.map(
        lambda part: jnp.moveaxis(part, 0, 2).reshape(*part.shape[1:3], -1, *part.shape[4:]), found
    )


def attend(
    query: Float[Array, "B A Q H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S H"],
    visible: Bool[Array, "B Q S"],
    scale: float | None = None,
    softcap: float | None = None,
    sums_in_float64: bool = False,
) -> tuple[Float[Array, "B A Q H"], Float[Array, "B A Q S"]]:
    """Computes attention, softmax in float32; query head a reads key-value head `a // (A / K)`.

    Scores are multiplied by `scale`, by default `H**-0.5`, and bounded by `softcap`. Those of long
    texts are computed in blocks. With `sums_in_float64`, on a CPU, a 16-bit row does not depend on
    the order of its slots.
    """
    batch, heads, count, width = query.shape
    if has_blocks(count):

        def attend_block(query, visible):
            return attend(query, keys, values, visible, scale, softcap, sums_in_float64)

        mixed, weights = in_blocks(attend_block, (query, 2), (visible, 1))
        return mixed, weights
    groups, num_slots = keys.shape[1], keys.shape[2]
    # The heads of a group share one product: (A/K * Q) rows times that group's keys.
    grouped = query.reshape(batch, groups, heads // groups * count, width)
    scores = jnp.einsum(
        "bkmh,bksh->bkms",
        grouped,
        keys,
        precision=FULL_PRECISION,
        preferred_element_type=jnp.float32,
    )
    scores = scores.reshape(batch, heads, count, num_slots) * (scale or width**-0.5)
    scores = soft_cap(scores, softcap)
    scores = jnp.where(visible[:, None], scores, jnp.finfo(jnp.float32).min)
    is_exact = sums_in_float64 and has_16_bits(query.dtype)
    weights = _exact_softmax(scores) if is_exact else jax.nn.softmax(scores, axis=-1)
    shared = weights.astype(values.dtype).reshape(batch, groups, -1, num_slots)
    mixed = in_float64(_mixed, shared, values) if is_exact else _mixed(shared, values)
    return mixed.reshape(batch, heads, count, width), weights


def _exact_softmax(scores: Float[Array, "B A Q S"]) -> Float[Array, "B A Q S"]:
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    return weights / total(weights)


def _mixed(weights: Float[Array, "B K M S"], values: Float[Array, "B K S H"]) -> Array:
    return jnp.einsum(
        "bkms,bksh->bkmh",
        weights,
        values,
        precision=FULL_PRECISION,
        preferred_element_type=jnp.promote_types(values.dtype, jnp.float32),
    )


def attend_to_blocks(
    query: Float[Array, "B A Q H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S H"],
    visible: Bool[Array, "B Q S"],
    num_slots: Int[Array, ""],
    scale: float | None = None,
    softcap: float | None = None,
) -> Float[Array, "B A Q H"]:
    """Computes what `attend` does, up to rounding, for one block of slots after the other.

    There are more than `KEY_BLOCK`. Scores of a block stay in fast memory, and whole blocks beyond
    the first `num_slots` slots, those that any row sees, are not read. A row's result does not
    depend on `num_slots`. It has no gradients.
    """
    batch, heads, count, width = query.shape
    if has_blocks(count):
        return in_blocks(
            lambda query, visible: attend_to_blocks(
                query, keys, values, visible, num_slots, scale, softcap
            ),
            (query, 2),
            (visible, 1),
        )
    groups, slots = keys.shape[1:3]
    num_blocks, rest = divmod(slots, KEY_BLOCK)
    grouped = query.reshape(batch, groups, heads // groups * count, width)
    rows = (batch, groups, heads // groups, count)  # XLA takes twice the time with heads at once
    products = {"precision": FULL_PRECISION, "preferred_element_type": jnp.float32}
    least = jnp.finfo(jnp.float32).min

    def add(number, carry, size=KEY_BLOCK):
        top, total, mixed = carry
        own_keys, own_values, seen = (
            lax.dynamic_slice_in_dim(each, number * KEY_BLOCK, size, axis=2)
            for each in (keys, values, visible)
        )
        scores = jnp.einsum("bkmh,bksh->bkms", grouped, own_keys, **products)
        scores = scores.reshape(*rows, size) * (scale or width**-0.5)
        scores = jnp.where(seen[:, None, None], soft_cap(scores, softcap), least)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_top[..., None])
        shared = weights.astype(values.dtype).reshape(batch, groups, -1, size)
        part = jnp.einsum("bkms,bksh->bkmh", shared, own_values, **products).reshape(mixed.shape)
        faded = jnp.exp(top - new_top)
        total = total * faded + jnp.sum(weights, axis=-1)
        return new_top, total, mixed * faded[..., None] + part

    blank = jnp.full(rows, least), jnp.zeros(rows), jnp.zeros((*rows, width))
    found = lax.fori_loop(0, jnp.minimum(-(-num_slots // KEY_BLOCK), num_blocks), add, blank)
    _, total, mixed = add(num_blocks, found, rest) if rest else found
    return (mixed / total[..., None]).reshape(query.shape)
