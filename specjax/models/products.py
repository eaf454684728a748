"""Matrix products with weights, and lookups of table rows.

Weights are `[out, in]`, as Hugging Face stores them: loading only renames them, and passes over a
few rows run faster on CPU. Products take inputs of the weights' dtype and accumulate in float32.
Float32 products run at full precision on every device: TF32 rounding depends on the number of rows,
so the text would depend on it too.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from specjax.models.native import PackedWeight, packed_product
from specjax.models.quantize import QuantizedWeight, Weight, dequantized, is_stored

FULL_PRECISION = lax.Precision.HIGHEST
BLOCK_ROWS = 256  # of a quantised weight: the number that a CPU converts at a time


def project(
    x: Float[Array, "... I"],
    weight: Weight,
    dtype: DTypeLike,
    count: Int[Array, ""] | None = None,
) -> Float[Array, "... O"]:
    """Returns `x @ weight.T` as `dtype`, accumulated in float32.

    Of x `[B, Q, I]` only the first `count` tokens of each sequence matter, all of them by default;
    native kernels compute no others.

    16-bit products are written as matrix units want them: two axes each, a float32 result, and no
    fewer than `min_rows`: a TPU computes a single row 3 times slower, and XLA on a CPU up to 100.
    """
    rows = x.astype(weight.dtype).reshape(-1, x.shape[-1])
    if isinstance(weight, PackedWeight) and count is not None:
        by_token = rows.reshape(x.shape).swapaxes(0, 1)  # so that those that matter come first
        y = packed_product(by_token.reshape(rows.shape), weight, count * len(x))
        return y.astype(dtype).reshape(*by_token.shape[:2], -1).swapaxes(0, 1)
    if isinstance(weight, PackedWeight):
        y = packed_product(rows, weight)
    elif isinstance(weight, QuantizedWeight):
        y = _quantized_product(rows, weight)
    else:
        y = _with_min_rows(_product, rows, weight)
    return y.astype(dtype).reshape(*x.shape[:-1], -1)


def _with_min_rows(
    product: Callable[[Array, Any], Array], rows: Float[Array, "R I"], weight: Any
) -> Float[Array, "R O"]:
    """Computes a product of at least `min_rows` rows, zeros below, and returns the given ones."""
    count, least = len(rows), min_rows(weight.dtype)
    if count >= least:
        return product(rows, weight)
    return product(jnp.pad(rows, ((0, least - count), (0, 0))), weight)[:count]


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
        cpu=partial(_with_min_rows, _blocked_product),
        cuda=_scaled_product,  # which converts the weight within the product of a single row
        default=partial(_with_min_rows, _scaled_product),
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
    return 8 if jnp.finfo(dtype).bits == 16 else 1


def lookup(table: Weight, tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
    """Returns the rows of an embedding table."""
    if is_stored(table):
        return dequantized(table[tokens])
    if table.dtype.itemsize > 2:
        return table[tokens]

    def as_bits(table, tokens):
        # XLA on CPU would convert a whole 16-bit table to float32, and move that out of the loop.
        table, tokens = lax.optimization_barrier((table, tokens))
        rows = lax.bitcast_convert_type(table, jnp.uint16)[tokens]
        return lax.bitcast_convert_type(rows, table.dtype)

    return lax.platform_dependent(table, tokens, cpu=as_bits, default=lambda table, at: table[at])
