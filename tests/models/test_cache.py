from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import native
from specjax.models.cache import KVCache, write_slots
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


def test_a_new_cache_is_empty_and_sized_by_the_config():
    cache = KVCache.create(CONFIG, batch=3, num_slots=5, dtype=jnp.bfloat16)
    assert len(cache.keys) == len(cache.values) == CONFIG.num_hidden_layers
    assert cache.keys[0].shape == (3, CONFIG.num_key_value_heads, 5, CONFIG.head_dim)
    assert cache.keys[0].dtype == jnp.bfloat16
    assert cache.num_slots == 5
    assert cache.prompt_length.tolist() == [5, 5, 5]
    assert cache.length.tolist() == [0, 0, 0]
    assert KVCache.create(CONFIG, 1, 5, prompt_length=9).prompt_length.tolist() == [9]


@pytest.mark.parametrize(
    ("starts", "shape", "axis"),
    [
        ([2], (6, 2), 1),
        ([2], (2, 6, 4), 2),
        ([0, 3, 1], (6,), 1),
        ([0, 3, 1], (2, 6, 4), 2),
    ],
)
def test_rows_are_written_from_the_start_of_each_text(starts, shape, axis):
    buffer = np.random.default_rng(0).normal(size=(len(starts), *shape)).astype(np.float32)
    rows = -np.ones_like(np.take(buffer, [0, 1, 2], axis))
    expected = buffer.copy()
    for text, start in enumerate(starts):
        np.moveaxis(expected[text], axis - 1, 0)[start : start + 3] = -1
    written = write_slots(jnp.asarray(buffer), jnp.asarray(rows), jnp.array(starts), axis)
    np.testing.assert_array_equal(written, expected)


def test_a_row_sees_what_is_committed_and_the_scratch_it_may_see():
    lengths = [0, 3]
    cache = numbered_cache(lengths, num_slots=7)
    visible = jnp.array([[True, False, False], [True, True, False]])
    seen = cache.visible_slots(jnp.broadcast_to(visible, (len(lengths), 2, 3)))
    for text, length in enumerate(lengths):
        for row in range(2):
            expected = [True] * length + visible[row].tolist() + [False] * (4 - length)
            assert seen[text, row].tolist() == expected


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
