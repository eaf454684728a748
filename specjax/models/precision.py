"""The dtype and the rows of a pass that suit a model and the machine it runs on."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from specjax.core.compilation import is_before_ampere
from specjax.models.config import TransformerConfig
from specjax.models.native import PANEL, is_available, packed, packed_product
from specjax.models.products import project
from specjax.models.quantize import quantize

# Smaller float32 weights fit in the caches of a CPU, where neither dtype waits for memory.
MIN_BYTES = 128 * 2**20
ROWS, INPUTS, OUTPUTS = 8, 1024, 4096  # of the products that are timed
PACKED_BYTES = 2**26  # of packed ones: more than most caches hold
CHEAP = 1.2  # times the time of one row
REPEATS = 5


def default_dtype(num_params: int, is_packed: bool) -> jnp.dtype:
    """Returns the dtype in which a model of this size decodes fastest on the default device.

    Products with packed weights wait for memory, and bfloat16 halves it. XLA's on a CPU are timed,
    since they are fast in bfloat16 only where there are units for it, which no name tells.
    """
    platform = jax.default_backend()
    if platform == "cpu":
        is_small = 4 * num_params < MIN_BYTES
        is_alone = jax.process_count() == 1  # several must make the same choice
        is_faster = is_alone and not is_small and (is_packed or _bfloat16_is_faster())
        return jnp.dtype("bfloat16" if is_faster else "float32")
    # Older GPUs compute bfloat16 in float32.
    return jnp.dtype("float16" if is_before_ampere() else "bfloat16")


def cache_dtype(has_native_layers: bool) -> jnp.dtype | None:
    """Returns the dtype in which keys and values should be kept; None: that of the weights.

    On a CPU only native attention is fast in 16 bits.
    """
    is_slow = jax.default_backend() == "cpu" and not has_native_layers
    return jnp.dtype("float32") if is_slow else None


def _bfloat16_is_faster() -> bool:
    product = jax.jit(lambda x, weight: project(x, weight, jnp.float32))
    shapes = (ROWS, INPUTS), (OUTPUTS, INPUTS)
    dtypes = "float32", "bfloat16"
    calls = [partial(product, *(jnp.ones(shape, dtype) for shape in shapes)) for dtype in dtypes]
    float32, bfloat16 = _seconds_of(calls)
    return bfloat16 < float32


def cheap_rows(config: TransformerConfig, kind: str | None = None) -> int:
    """Returns the rows of a pass that takes this CPU little longer than one row: 2, 4 or 8.

    It is 8 for XLA's products, and 4 for a model that fits in the caches of a CPU. For others
    products are timed, with weights of this kind: int8, int4, or None for floats. Some machines
    wait for memory while they compute eight rows, some hardly while they compute two.
    """
    if not is_available() or jax.process_count() > 1:  # several must make the same choice
        return ROWS
    num_weights = 3 * config.num_hidden_layers * config.hidden_size * config.intermediate_size
    with jax.ensure_compile_time_eval():  # drafters may be made while a program is traced
        return 4 if 4 * num_weights < MIN_BYTES else _timed_rows(kind)


@cache
def _timed_rows(kind: str | None) -> int:
    dtype = jnp.dtype("bfloat16")
    bits = 16 if kind is None else jnp.iinfo(kind).bits
    outputs = 8 * PACKED_BYTES // bits // INPUTS
    first = jnp.zeros((PANEL, INPUTS), dtype)
    panel = packed(first if kind is None else quantize(first, kind, dtype))
    repeated = jax.tree.map(lambda leaf: jnp.repeat(leaf, outputs // PANEL, axis=0), panel)
    weight = replace(repeated, shape=(outputs, INPUTS))
    product = partial(jax.jit(packed_product), jnp.ones((ROWS, INPUTS), weight.dtype), weight)
    one, four, eight = _seconds_of([partial(product, count) for count in (1, 4, ROWS)])
    return ROWS if eight < CHEAP * one else 4 if four < CHEAP * one else 2


def _seconds_of(calls: Sequence[Callable[[], Array]]) -> list[float]:
    """Returns the median seconds of calls, made in turn."""
    seconds = np.zeros((REPEATS + 1, len(calls)))
    for repeat, number in np.ndindex(seconds.shape):
        start = time.perf_counter()
        calls[number]().block_until_ready()
        seconds[repeat, number] = time.perf_counter() - start
    return np.median(seconds[1:], axis=0).tolist()  # the first ones compile
