"""Sums whose result does not depend on their order, for models in 16 bits on a CPU.

XLA picks the order of a sum by the shape of the whole, and in a tree the ancestors of a row stand
in other slots than in plain decoding. The last bit of a float32 sum then differs and, after
rounding to 16 bits, now and then a whole row. The error of float64 is too small to show in float32.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def in_float64(function: Callable[..., Array], *inputs: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes a float32 function in float64 on a CPU, and as it is elsewhere."""

    def wide(*inputs: Array) -> Array:
        with jax.enable_x64(True):
            result = function(*(lax.convert_element_type(x, jnp.float64) for x in inputs))
            return lax.convert_element_type(result, jnp.float32)

    return lax.platform_dependent(*inputs, cpu=wide, default=function)


def directly(function: Callable[..., Array], *inputs: Array) -> Array:
    """Computes a function as it is."""
    return function(*inputs)


def mean_for(dtype: DTypeLike, x: Float[Array, "... D"]) -> Float[Array, "... 1"]:
    """Returns the means of float32 rows, in any order alike if their model computes in 16 bits."""

    def mean(x: Array) -> Array:
        return jnp.mean(x, axis=-1, keepdims=True)

    return (in_float64 if jnp.finfo(dtype).bits == 16 else directly)(mean, x)
