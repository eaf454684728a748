"""Order-independent sums for 16-bit models.

XLA picks the order of a sum by the shape of the arrays, and in a tree the ancestors of a node are
in other slots than in plain decoding. The last bit of a float32 sum may then differ, and rounding
to 16 bits can amplify the difference. An error of float64 hardly ever shows in float32.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

Platforms = tuple[str, ...]  # names as JAX has them
CPU = ("cpu",)
WITH_FLOAT64 = (*CPU, "cuda", "rocm")  # a TPU emulates it, slowly


def has_16_bits(dtype: DTypeLike) -> bool:
    """Whether numbers of this dtype have 16 bits."""
    return jnp.finfo(dtype).bits == 16


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def in_float64(
    function: Callable[..., Array], platforms: Platforms, *inputs: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Computes a float32 function in float64 on these platforms, and as it is elsewhere.

    Its gradients are those of the function in float32.
    """

    def wide(*inputs: Array) -> Array:
        with jax.enable_x64(True):
            result = function(*(lax.convert_element_type(x, jnp.float64) for x in inputs))
            return lax.convert_element_type(result, jnp.float32)

    return lax.platform_dependent(*inputs, default=function, **dict.fromkeys(platforms, wide))


@in_float64.defjvp
def _slope_of(
    function: Callable[..., Array],
    platforms: Platforms,
    inputs: tuple[Array, ...],
    tangents: tuple[Array, ...],
) -> tuple[Array, Array]:
    return in_float64(function, platforms, *inputs), jax.jvp(function, inputs, tangents)[1]


def row_mean(x: Float[Array, "... D"], dtype: DTypeLike) -> Float[Array, "... 1"]:
    """Returns the means of float32 rows; the same in any order if the model computes in 16 bits."""
    mean = partial(jnp.mean, axis=-1, keepdims=True)
    return in_float64(mean, CPU, x) if has_16_bits(dtype) else mean(x)


def total(x: Float[Array, "... S"], platforms: Platforms) -> Float[Array, "... 1"]:
    """Returns the sums of float32 rows; on these platforms the same in any order."""
    return in_float64(partial(jnp.sum, axis=-1, keepdims=True), platforms, x)
