"""Induction heads: sources of copies by a slow reading, and heads that look where they should."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.cache import KVCache
from specjax.models.target import Taps, causal_rows
from specjax.tuning.induction_heads import (
    all_heads,
    copy_sources,
    count_copies,
    most_attended,
    ranked,
)
from tests.decoding.tiny import target


def test_a_copied_token_comes_from_the_longest_matching_suffix():
    #       0  1  2  3  4  5 | 6  7  8  9
    text = [1, 2, 3, 4, 2, 5, 1, 2, 3, 9]
    assert copy_sources(text, 6) == [(6, 0), (7, 1), (8, 2)]
    assert copy_sources([1, 2, 3, 2, 7, 2], 4) == [(5, 3)], "of equals the last"
    assert copy_sources([1, 2], 2) == []


def test_heads_are_ranked_by_how_often_they_copied():
    counts = np.array([[0, 5], [9, 5], [0, 0]])
    assert ranked(counts) == ((1, 0, 9), (0, 1, 5), (1, 1, 5))


def test_what_heads_look_at_is_what_one_pass_reveals():
    model, params = target()
    text = np.random.default_rng(0).integers(0, 40, 75).tolist()
    attended = most_attended(text, model, params)
    heads = all_heads(model.config)
    rows = causal_rows(jnp.asarray([text]), jnp.zeros(1, jnp.int32))
    cache = KVCache.create(model.config, 1, len(text))
    run = partial(model.run, taps=Taps(attention_heads=heads))
    output, _ = jax.jit(run)(params, rows, cache)
    expected = np.argmax(np.asarray(output.attention[0]), axis=-1)
    np.testing.assert_array_equal(attended.reshape(expected.shape), expected)

    pairs = copy_sources(text, 40)
    counts = count_copies([(text, 40), (text[:20], 20)], model, params)
    for number, (layer, head) in enumerate(heads):
        times = sum(expected[number, at - 1] == source for at, source in pairs)
        assert counts[layer, head] == times
    assert counts.sum() > 0
