"""Hydra's heads and their prefix layer against the formulas, and what they say before training."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.models.cache import KVCache
from specjax.models.heads import HeadWeights
from specjax.models.heads.hydra import HydraConfig, HydraHeads
from specjax.models.target import causal_rows
from tests.decoding.heads import hydra_head, hydra_logits
from tests.decoding.tiny import target
from tests.models.test_transformer import literal_layer, literal_norm

MODEL, TARGET_PARAMS = target()
TABLE = TARGET_PARAMS["lm_head"]["weight"]
FEATURES = jax.random.normal(jax.random.key(3), (2, 3, 32))
EMBEDDED = jax.random.normal(jax.random.key(4), (2, 3, 4, 32))


# ---- Heads ---------------------------------------------------------------------------------------


def weights_of(params) -> HeadWeights:
    return HeadWeights(params, MODEL, TARGET_PARAMS)


@pytest.mark.parametrize("has_lm_heads", [True, False])
def test_heads_compute_what_the_formula_says(has_lm_heads):
    module, params = hydra_head(has_lm_heads=has_lm_heads)
    assert ("lm_heads_0" in params) == has_lm_heads and module.config.num_layers == 3
    for depth in range(1, 5):
        embedded = EMBEDDED[:, :, :depth]
        logits = module.logits_at(weights_of(params), depth, FEATURES, embedded)
        assert logits.shape == (2, 3, 40)
        for row in np.ndindex(2, 3):
            feature, tokens = np.asarray(FEATURES[row]), np.asarray(embedded[row])
            expected = hydra_logits(module, params, feature, tokens, np.asarray(TABLE))
            np.testing.assert_allclose(logits[row], expected, rtol=1e-4, atol=1e-3)


# ---- The prefix layer ----------------------------------------------------------------------------


def test_the_prefix_layer_computes_what_the_formula_says():
    module, params = hydra_head(has_prefix=True)
    features = jax.random.normal(jax.random.key(5), (2, 7, 32))
    rows = causal_rows(jnp.zeros((2, 7), jnp.int32), jnp.zeros(2, jnp.int32))
    cache = KVCache.create(module.config.layers, 2, 9)
    found, cache = module.run(weights_of(params), rows, features, cache)
    for row in range(2):
        own, visible = np.asarray(features[row], np.float64), np.tri(7, dtype=bool)
        expected = literal_layer(module.config.layers, params["layers_0"], own, visible)
        expected = literal_norm(module.config.layers, params["norm"], expected)
        np.testing.assert_allclose(found[row], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(cache.positions[:, :7], rows.positions)


def test_without_a_prefix_layer_features_are_what_heads_read():
    module, params = hydra_head()
    rows = causal_rows(jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32))
    empty = KVCache.create(module.config.layers, 2, 9)
    found, cache = module.run(weights_of(params), rows, FEATURES, empty)
    assert found is FEATURES and cache is empty and cache.keys == ()


# ---- Params to begin with ------------------------------------------------------------------------


def test_heads_begin_with_what_the_target_says_of_its_next_token():
    """And with little of the embeddings; a gradient reaches everything."""
    module = HydraHeads(HydraConfig.for_target(MODEL.config, num_heads=2, num_layers=2))
    params = module.initialise(jax.random.key(0), lm_head=TABLE)
    embedded = TARGET_PARAMS["embed_tokens"]["weight"][jnp.arange(12).reshape(2, 3, 2)]
    expected = MODEL.logits(TARGET_PARAMS, FEATURES)

    def logits(params, depth, embedded):
        own = embedded[:, :, :depth]
        return module.logits_at(weights_of(params), depth, FEATURES, own)

    for depth in (1, 2):
        alone = logits(params, depth, jnp.zeros_like(embedded))
        np.testing.assert_allclose(alone, expected, atol=1e-5)
        along = np.abs(logits(params, depth, embedded) - alone).max()
        assert 0 < along < 0.2 * np.abs(expected).max()
    assert params["lm_heads_0"]["weight"] is not TABLE  # training gives its buffers away
    np.testing.assert_array_equal(params["lm_heads_0"]["weight"], TABLE)
    np.testing.assert_array_equal(params["lm_heads_1"]["bias"], np.zeros(40))

    def loss(params):
        return sum(jnp.sum(logits(params, depth, embedded) ** 2) for depth in (1, 2))

    for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(params)):
        assert np.abs(leaf).max() > 0  # training must not get stuck at zeros


def test_random_params_have_the_dtype_asked_for():
    module = HydraHeads(HydraConfig.for_target(MODEL.config, has_prefix=True, num_heads=2))
    params = module.initialise(jax.random.key(0), jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    first, second = (np.asarray(params[f"lm_heads_{n}"]["weight"], float) for n in range(2))
    assert (first != second).mean() > 0.9
    features, embedded = FEATURES.astype(jnp.bfloat16), EMBEDDED.astype(jnp.bfloat16)
    logits = module.logits_at(weights_of(params), 2, features, embedded[:, :, :2])
    assert logits.dtype == jnp.float32


# ---- Settings ------------------------------------------------------------------------------------


def test_a_prefix_layer_is_shaped_like_the_targets_and_sees_all_of_the_text():
    kinds = ("sliding_attention", "full_attention")
    windowed = replace(MODEL.config, sliding_window=4, layer_types=kinds)
    plain, prefix = (HydraConfig.for_target(windowed, has_prefix) for has_prefix in (False, True))
    assert prefix.layers == replace(MODEL.config, num_hidden_layers=1)
    assert plain.layers == replace(MODEL.config, num_hidden_layers=0)
    assert prefix.has_prefix and not plain.has_prefix
    assert (plain.num_heads, plain.num_layers, plain.has_lm_heads) == (4, 4, True)
    assert (plain.hidden_size, plain.vocab_size) == (32, 40)


@pytest.mark.parametrize("changes", [{"num_heads": 0}, {"num_layers": 0}])
def test_there_must_be_heads_and_blocks(changes):
    with pytest.raises(SpecjaxError, match=f"`{next(iter(changes))}` must be at least 1"):
        HydraConfig.for_target(MODEL.config, **changes)


def test_there_is_one_prefix_layer_at_most():
    with pytest.raises(SpecjaxError, match="a Hydra head with 2 prefix layers is not supported"):
        HydraConfig(MODEL.config)
