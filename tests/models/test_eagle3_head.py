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
FEATURES = jax.random.normal(jax.random.key(1), (1, 1, 3, MODEL.config.hidden_size))
EACH, ALL = np.array([1.0, 30.0, 0.1]).reshape(1, 1, 3, 1), 30.0  # factors of the features


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
    params = jax.tree.map(lambda leaf: 3 * leaf, head.initialise(jax.random.key(0)))

    @jax.jit
    def draft(feature) -> list[jax.Array]:
        """Returns the outputs of a chain of the head's own features."""
        cache, outputs = KVCache.create(head.config.layers, 1, 3), []
        for token in range(3):
            rows = causal_rows(jnp.array([[token]]), cache.length)
            feature, cache = head.run(HeadWeights(params, MODEL, WEIGHTS), rows, feature, cache)
            cache = cache.advance(jnp.ones_like(cache.length))
            outputs.append(feature)
        return outputs

    base = draft(FEATURES.reshape(1, 1, -1))
    for factor in (ALL, EACH):
        scaled = draft((FEATURES * factor).reshape(1, 1, -1))
        is_same = np.allclose(scaled[0], base[0], rtol=1e-2)
        assert is_same == any(factor is ignored for ignored in ignores)
    sizes = [float(np.sqrt(np.mean(output**2))) for output in base]
    assert np.allclose(sizes, 3.0, rtol=1e-3) == ("norm_output" in norms)  # the norm's weights
