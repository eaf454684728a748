"""The norms of EAGLE-3.1: of the target's features, and of the output."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.cache import KVCache
from specjax.models.heads import HeadWeights
from specjax.models.heads.eagle3 import Eagle3Config, Eagle3Head, TapNorm
from specjax.models.target import causal_rows
from tests.decoding.tiny import target

MODEL, WEIGHTS = target()
FEATURES = jax.random.normal(jax.random.key(1), (1, 1, 3, MODEL.config.hidden_size))
EACH, ALL = np.array([1.0, 30.0, 0.1]).reshape(1, 1, 3, 1), 30.0  # factors of the features


def outputs(norms: dict, factor=1.0, depth: int = 3) -> list[np.ndarray]:
    """The outputs of a chain of a head's own features."""
    head = Eagle3Head(Eagle3Config.for_target(MODEL.config, **norms))
    params = jax.tree.map(lambda leaf: 3 * leaf, head.initialise(jax.random.key(0)))
    feature, found = (FEATURES * factor).reshape(1, 1, -1), []
    cache = KVCache.create(head.config.layers, 1, depth)
    for token in range(depth):
        rows = causal_rows(jnp.array([[token]]), cache.length)
        feature, cache = head.run(HeadWeights(params, MODEL, WEIGHTS), rows, feature, cache)
        cache = cache.advance(jnp.ones_like(cache.length))
        found.append(np.asarray(feature))
    return found


@pytest.mark.parametrize(
    ("norm", "ignores"), [("none", ()), ("joined", (ALL,)), ("each", (ALL, EACH))]
)
def test_a_norm_of_features_makes_their_scale_irrelevant(norm: TapNorm, ignores):
    [base] = outputs({"tap_norm": norm}, depth=1)
    for factor in (ALL, EACH):
        [scaled] = outputs({"tap_norm": norm}, factor, depth=1)
        is_same = np.allclose(scaled, base, rtol=1e-2)
        assert is_same == any(factor is ignored for ignored in ignores)


@pytest.mark.parametrize("norm_output", [True, False])
def test_normed_outputs_keep_their_size_over_the_depth_of_a_draft(norm_output):
    sizes = [float(np.sqrt(np.mean(each**2))) for each in outputs({"norm_output": norm_output})]
    assert np.allclose(sizes, 3.0, rtol=1e-3) == norm_output  # the norm's weights are 3
