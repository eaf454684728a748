"""The dtype that suits a model and the machine it runs on."""

import time

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.products import project

# Smaller float32 weights fit in the caches of a CPU, where neither dtype waits for memory.
MIN_BYTES = 128 * 2**20
ROWS, INPUTS, OUTPUTS = 8, 1024, 4096  # of the products that are timed
REPEATS = 5
FIRST_WITH_BFLOAT16 = 8.0  # compute capability; older GPUs compute bfloat16 in float32


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
    if platform == "gpu":
        capability = getattr(jax.devices()[0], "compute_capability", None)
        if capability is not None and float(capability) < FIRST_WITH_BFLOAT16:
            return jnp.dtype("float16")
    return jnp.dtype("bfloat16")


def cache_dtype(is_packed: bool) -> jnp.dtype | None:
    """Returns the dtype in which keys and values should be kept; None: that of the weights.

    On a CPU only native attention, that of packed weights, is fast in 16 bits.
    """
    is_slow = jax.default_backend() == "cpu" and not is_packed
    return jnp.dtype("float32") if is_slow else None


def _bfloat16_is_faster() -> bool:
    product = jax.jit(lambda x, weight: project(x, weight, jnp.float32))
    shapes = (ROWS, INPUTS), (OUTPUTS, INPUTS)
    pairs = [[jnp.ones(shape, dtype) for shape in shapes] for dtype in ("float32", "bfloat16")]
    seconds = np.zeros((REPEATS + 1, len(pairs)))
    for repeat, number in np.ndindex(seconds.shape):
        start = time.perf_counter()
        product(*pairs[number]).block_until_ready()
        seconds[repeat, number] = time.perf_counter() - start
    float32, bfloat16 = np.median(seconds[1:], axis=0)  # the first ones compile
    return bool(bfloat16 < float32)
