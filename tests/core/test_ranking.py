"""The best scores are those of `argmax` and `top_k`, ties and all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from specjax.core.ranking import best_token, best_tokens


@pytest.mark.parametrize("size", [1, 1000, 4096])
@pytest.mark.parametrize("levels", [3, 40, 10**6])  # few levels: many ties
def test_results_are_those_of_argmax_and_top_k(size, levels):
    scores = jax.random.randint(jax.random.key(size), (2, 3, size), 0, levels).astype(jnp.float32)
    scores = jnp.where(scores == 0, -jnp.inf, scores)
    np.testing.assert_array_equal(best_token(scores), jnp.argmax(scores, axis=-1))
    for k in (1, 2, min(10, size)):
        if k <= size:
            for ours, theirs in zip(best_tokens(scores, k), lax.top_k(scores, k), strict=True):
                np.testing.assert_array_equal(ours, theirs)


def test_nan_is_the_best():
    scores = jnp.zeros(500).at[300].set(jnp.nan)
    assert best_token(scores) == 300
