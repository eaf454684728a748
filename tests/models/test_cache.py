from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import native
from specjax.models.cache import KVCache
from specjax.models.config import TransformerConfig

WITH_KERNELS = pytest.mark.skipif(not native.is_available(), reason="no native kernels here")

CONFIG = TransformerConfig(11, 8, 8, 2, 4, 2, 2)


def numbered_cache(lengths: list[int], dtype: str = "float32") -> KVCache:
    """A cache whose slot s of text b holds the number 100 b + s everywhere (negative: values)."""
    cache = KVCache.create(CONFIG, len(lengths), num_slots=9)
    numbers = 100 * jnp.arange(len(lengths))[:, None] + jnp.arange(9)[None]
    filled = jnp.broadcast_to(numbers[:, None, :, None], cache.keys[0].shape).astype(dtype)
    keys, values = (filled, filled), (-filled, -filled)
    return replace(cache, keys=keys, values=values, positions=numbers, length=jnp.array(lengths))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_native", [False, pytest.param(True, marks=WITH_KERNELS)])
def test_keep_moves_a_path_to_the_front_of_the_scratch(is_native, dtype):
    """The last path is empty, and the committed text stays as it is."""
    lengths, count = [2, 4, 3], np.array([3, 2, 0])
    path = np.array([[0, 2, 4], [0, 3, 0], [0, 0, 0]])
    keep = jax.jit(partial(KVCache.keep, num_rows=5, is_native=is_native))
    kept = keep(numbered_cache(lengths, dtype), path, count)
    np.testing.assert_array_equal(kept.length, lengths + count)
    for text, length in enumerate(lengths):
        rows = path[text, : count[text]] + length
        expected = 100 * text + np.concatenate([np.arange(length), rows])
        used = len(expected)
        np.testing.assert_array_equal(kept.positions[text, :used], expected)
        for keys, values in zip(kept.keys, kept.values, strict=True):
            np.testing.assert_array_equal(keys[text, 1, :used, 0], expected)
            np.testing.assert_array_equal(values[text, 0, :used, 1], -expected)


@WITH_KERNELS
@pytest.mark.parametrize("path", [[0, 5], [0, 0], [0, -1]])
def test_a_path_that_leaves_the_scratch_or_does_not_ascend_raises_an_error(path):
    cache = numbered_cache([4])
    with pytest.raises(jax.errors.JaxRuntimeError, match="specjax: a path"):
        cache.keep(jnp.array([path]), jnp.array([2]), 5, True)
