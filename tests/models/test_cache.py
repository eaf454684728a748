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

CONFIG = TransformerConfig(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=2,
)


def numbered_cache(lengths: list[int], num_slots: int) -> KVCache:
    """A cache whose slot s of text b holds the number 100 b + s everywhere (negative: values)."""
    cache = KVCache.create(CONFIG, len(lengths), num_slots)
    numbers = 100.0 * np.arange(len(lengths))[:, None] + np.arange(num_slots)[None, :]
    filled = np.broadcast_to(numbers[:, None, :, None], cache.keys[0].shape).astype("float32")
    return KVCache(
        keys=tuple(jnp.asarray(filled) for _ in cache.keys),
        values=tuple(jnp.asarray(-filled) for _ in cache.values),
        positions=jnp.asarray(numbers, jnp.int32),
        length=jnp.array(lengths, jnp.int32),
        prompt_length=cache.prompt_length,
    )


@pytest.mark.parametrize(
    ("lengths", "is_native", "dtype"),
    [
        ([2], False, "float32"),
        ([2, 4, 3], False, "bfloat16"),
        pytest.param([2], True, "float32", marks=WITH_KERNELS),
        pytest.param([2, 4, 3], True, "bfloat16", marks=WITH_KERNELS),
    ],
)
def test_keep_moves_a_path_to_the_front_of_the_scratch(lengths, is_native, dtype):
    """The last path is empty, and the committed text stays as it is."""
    cache = numbered_cache(lengths, num_slots=9)
    arrays = partial(map, np.asarray)
    in_dtype = lambda caches: tuple(each.astype(dtype) for each in caches)  # noqa: E731
    cache = replace(cache, keys=in_dtype(cache.keys), values=in_dtype(cache.values))
    path = np.array([[0, 2, 4], [0, 3, 0], [0, 0, 0]])[: len(lengths)]
    count = np.array([3, 2, 0])[: len(lengths)]
    kept = jax.jit(partial(KVCache.keep, num_rows=5, is_native=is_native))(cache, path, count)
    assert kept.length.tolist() == (np.array(lengths) + count).tolist()
    for text, length in enumerate(lengths):
        rows = path[text, : count[text]] + length
        expected = 100 * text + np.concatenate([np.arange(length), rows])
        used = len(expected)
        np.testing.assert_array_equal(kept.positions[text, :used], expected)
        for keys, values in zip(*map(arrays, (kept.keys, kept.values)), strict=True):
            np.testing.assert_array_equal(keys[text, 1, :used, 0], expected)
            np.testing.assert_array_equal(values[text, 0, :used, 1], -expected)


@WITH_KERNELS
@pytest.mark.parametrize("path", [[0, 5], [0, 0], [0, -1]])
def test_a_path_that_leaves_the_scratch_or_does_not_ascend_raises_an_error(path):
    cache = numbered_cache([4], num_slots=9)
    with pytest.raises(jax.errors.JaxRuntimeError, match="specjax: a path"):
        cache.keep(jnp.array([path]), jnp.array([2]), 5, True)
