"""What memory bandwidth allows: at batch 1 a round can be no faster than its bytes are read."""

import time
from statistics import median

import jax
import jax.numpy as jnp

from specjax.hub import LoadedTarget

NUM_BYTES = 2**29  # far more than a cache holds
NUM_PASSES, NUM_RUNS = 8, 5


def read_bandwidth() -> float:
    """Bytes per second that the default device reads: the median of summing up a large array."""
    numbers = jnp.ones(NUM_BYTES // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    jax.block_until_ready(total(numbers))
    seconds = []
    for _ in range(NUM_RUNS):
        started = time.perf_counter()
        jax.block_until_ready([total(numbers) for _ in range(NUM_PASSES)])
        seconds.append(time.perf_counter() - started)
    return NUM_PASSES * NUM_BYTES / median(seconds)


def bytes_per_pass(target: LoadedTarget, length: float, num_rows: int = 1) -> float:
    """What a pass must read: the target's weights, and keys and values of `length` tokens per row.

    Of an embedding table that is not the LM head as well, it needs single rows only.
    """
    config, itemsize = target.config, target.dtype.itemsize
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(target.params))
    unread = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size * itemsize
    numbers_per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return weights - unread + num_rows * length * numbers_per_token * itemsize
