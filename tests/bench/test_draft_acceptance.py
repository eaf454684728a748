"""The share of drawn tokens that are accepted, and what it could be."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

from specjax.bench.draft_acceptance import acceptance, overlap
from specjax.models.cache import KVCache
from specjax.models.target import causal_rows
from tests.decoding.tiny import target


def test_only_judged_tokens_count():
    # Drafts of 2: three rounds accept none, two accept one, five accept both.
    stats = SimpleNamespace(accepted_lengths=np.array([[0, 3, 2, 5]]), mean_accepted_length=2.2)
    length, rate = acceptance(stats, length=2)
    assert length == 2.2
    assert rate == pytest.approx((2 * 1 + 5 * 2) / (2 * 1 + 5 * 2 + 3 + 2))


def test_overlap_is_1_minus_half_the_sum_of_differences():
    models = [target(), target(seed=1)]
    text = jnp.asarray(np.random.default_rng(0).integers(0, 40, (1, 9)))
    laws = []
    for model, params in models:
        cache = KVCache.create(model.config, 1, 9)
        output, _ = model.run(params, causal_rows(text, jnp.zeros(1, jnp.int32)), cache)
        laws.append(softmax(np.asarray(output.logits[0]) / 0.7, axis=-1))
    expected = 1 - np.abs(laws[0] - laws[1]).sum(axis=-1) / 2
    np.testing.assert_allclose(overlap(text, models, 0.7), expected, atol=1e-5)
