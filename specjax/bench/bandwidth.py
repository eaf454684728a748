"""Memory bandwidth: at batch 1 a round can be no faster than its bytes are read."""

import time
from dataclasses import replace
from functools import partial
from statistics import median

import jax
import jax.numpy as jnp

from specjax.bench.summary import Measurement
from specjax.core.memory import device_bytes
from specjax.loading.targets import LoadedTarget
from specjax.models.sharding import shard_batch

NUM_BYTES = 2**29  # far more than a cache holds
NUM_PASSES, NUM_RUNS = 8, 5


def read_bandwidth() -> float:
    """Returns the bytes per second that the default device reads, by summing a large array."""
    numbers = jnp.ones(NUM_BYTES // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    jax.block_until_ready(total(numbers))
    seconds = []
    for _ in range(NUM_RUNS):
        started = time.perf_counter()
        jax.block_until_ready([total(numbers) for _ in range(NUM_PASSES)])
        seconds.append(time.perf_counter() - started)
    return NUM_PASSES * NUM_BYTES / median(seconds)


def bytes_per_pass(target: LoadedTarget, length: float, batch_size: int = 1) -> float:
    """Returns the bytes that a pass reads: weights, and a cache of `length` tokens per sequence.

    On a mesh it counts one device, but on a CPU all of them, because they share their memory. An
    embedding table that is not also the LM head does not count: a pass reads single rows of it.
    """
    model, params, mesh = target.model, target.params, target.mesh
    # The embedding table is as large as the LM head.
    is_tied = target.config.tie_word_embeddings
    unread = 0 if is_tied else device_bytes(model.lm_head(params))
    slot = jax.eval_shape(partial(model.new_cache, params, batch_size, 1))
    slot = shard_batch(slot, mesh, batch_size)
    cache = length * device_bytes((slot.keys, slot.values))
    num_devices = 1 if mesh is None or jax.default_backend() != "cpu" else mesh.size
    return (device_bytes(params) - unread + cache) * num_devices


def with_bandwidth_share(
    row: Measurement, target: LoadedTarget, bandwidth: float | None
) -> Measurement:
    """Adds the share of `bandwidth`, in bytes per second, that the row's rounds must read."""
    # A peer has other weights and may run elsewhere.
    if bandwidth is None or row.peak_bytes is None or row.decode_seconds is None:
        return row
    num_bytes = bytes_per_pass(target, row.mean_length, row.batch) * row.passes
    return replace(row, bandwidth_share=num_bytes / row.decode_seconds / bandwidth)
