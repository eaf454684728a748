"""The norms of EAGLE-3.1: of the target's features, and of the output."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.cache import KVCache
from specjax.models.heads import HeadWeights
from specjax.models.heads.eagle3 import Eagle3Config, Eagle3Head
from specjax.models.target import causal_rows
from tests.decoding.tiny import target

MODEL, WEIGHTS = target()
FEATURES = np.random.default_rng(1).normal(size=(3, MODEL.config.hidden_size)).astype("float32")
ONE, ALL, EACH = np.float32([[1, 1, 1], [30, 30, 30], [1, 30, 0.1]])[..., None]  # their factors


@pytest.mark.parametrize(
    ("norms", "ignores"),
    [
        ({}, ()),
        ({"tap_norm": "joined"}, (ALL,)),
        ({"tap_norm": "each", "norm_output": True}, (ALL, EACH)),
    ],
)
def test_norms_make_the_scale_of_features_irrelevant_and_keep_that_of_outputs(norms, ignores):
    head = Eagle3Head(Eagle3Config.for_target(MODEL.config, **norms))
    numbers = np.random.default_rng(0)
    draw = lambda leaf: 3.0 if leaf.ndim == 1 else 0.06 * numbers.normal(size=leaf.shape)  # noqa: E731
    shapes = jax.eval_shape(head.initialise, jax.random.key(0))
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, draw(leaf), jnp.float32), shapes)

    @jax.jit
    def draft(params, feature) -> list[jax.Array]:
        """Returns the outputs of chains of the head's own features."""
        cache, outputs = KVCache.create(head.config.layers, 3, 2), []
        for token in range(2):
            rows = causal_rows(jnp.full((3, 1), token), cache.length)
            feature, cache = head.run(HeadWeights(params, MODEL, WEIGHTS), rows, feature, cache)
            cache = cache.advance(jnp.ones_like(cache.length))
            outputs.append(feature)
        return outputs

    first, second = draft(params, (FEATURES * np.stack([ONE, ALL, EACH])).reshape(3, 1, -1))
    for row, factor in ((1, ALL), (2, EACH)):
        is_same = np.allclose(first[row], first[0], rtol=1e-2)
        assert is_same == any(factor is ignored for ignored in ignores)
    sizes = [float(np.sqrt(np.mean(output[0] ** 2))) for output in (first, second)]
    assert np.allclose(sizes, 3.0, rtol=1e-3) == ("norm_output" in norms)  # the norm's weights
