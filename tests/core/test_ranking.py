"""The best scores are those of `argmax` and `top_k`, ties and all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.ranking import best_token, best_tokens


@pytest.mark.parametrize("size", [1, 1000, 4096])
def test_results_are_those_of_argmax_and_top_k(size):
    levels = np.array([3, 40, 10**6])[:, None, None]  # few levels: many ties
    scores = np.random.default_rng(size).integers(0, levels, (3, 6, size)).astype(np.float32)
    scores[scores == 0] = -np.inf
    order = np.argsort(-scores, axis=-1, kind="stable")
    np.testing.assert_array_equal(jax.jit(best_token)(scores), order[..., 0])
    for k in {1, min(2, size), min(10, size)}:
        best, tokens = jax.jit(best_tokens, static_argnums=1)(scores, k)
        np.testing.assert_array_equal(tokens, order[..., :k])
        np.testing.assert_array_equal(best, np.take_along_axis(scores, order[..., :k], axis=-1))


def test_nan_is_the_best():
    scores = jnp.zeros(500).at[300].set(jnp.nan)
    assert best_token(scores) == 300
