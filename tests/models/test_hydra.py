"""Hydra's heads and their prefix layer against the formulas, and what they say before training."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.models.cache import KVCache
from specjax.models.heads import HeadWeights
from specjax.models.heads.hydra import HydraConfig, HydraHeads
from specjax.models.target import causal_rows
from tests.decoding.heads import hydra_logits
from tests.decoding.tiny import target
from tests.models.heads import drawn
from tests.models.test_transformer import literal_layer, literal_norm

MODEL, TARGET_PARAMS = target()
TABLE = TARGET_PARAMS["lm_head"]["weight"]
NUMBERS = np.random.default_rng(3)
FEATURES = jnp.asarray(NUMBERS.normal(size=(2, 3, 32)), jnp.float32)
EMBEDDED = jnp.asarray(NUMBERS.normal(size=(2, 3, 4, 32)), jnp.float32)


def weights_of(params) -> HeadWeights:
    return HeadWeights(params, MODEL, TARGET_PARAMS)


@pytest.mark.parametrize("has_lm_heads", [True, False])
def test_heads_compute_what_the_formula_says(has_lm_heads):
    module = HydraHeads(HydraConfig.for_target(MODEL.config, False, 4, 3, has_lm_heads))
    params = drawn(module)
    assert ("lm_heads_0" in params) == has_lm_heads and module.config.num_layers == 3

    @jax.jit
    def logits_of(params, features, embedded):
        weights, depths = weights_of(params), range(1, 5)
        return [module.logits_at(weights, n, features, embedded[:, :, :n]) for n in depths]

    for depth, logits in enumerate(logits_of(params, FEATURES, EMBEDDED), 1):
        assert logits.shape == (2, 3, 40)
        for row in np.ndindex(2, 3):
            feature, tokens = FEATURES[row], EMBEDDED[row][:depth]
            expected = hydra_logits(module, params, feature, tokens, np.asarray(TABLE))
            np.testing.assert_allclose(logits[row], expected, rtol=1e-4, atol=1e-4)


def test_the_prefix_layer_computes_what_the_formula_says():
    module = HydraHeads(HydraConfig.for_target(MODEL.config, True, 1, 1))
    params, rows = drawn(module), causal_rows(jnp.zeros((2, 3), int), jnp.zeros(2, int))
    cache = KVCache.create(module.config.layers, 2, 5)
    run = jax.jit(lambda params: module.run(weights_of(params), rows, FEATURES, cache))
    found, cache = run(params)
    for row in range(2):
        own, visible = np.asarray(FEATURES[row], np.float64), np.tri(3, dtype=bool)
        expected = literal_layer(module.config.layers, params["layers_0"], own, visible)
        expected = literal_norm(module.config.layers, params["norm"], expected)
        np.testing.assert_allclose(found[row], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(cache.positions[:, :3], rows.positions)


def test_without_a_prefix_layer_features_are_what_heads_read():
    module = HydraHeads(HydraConfig.for_target(MODEL.config))
    rows = causal_rows(jnp.zeros((2, 3), int), jnp.zeros(2, int))
    empty = KVCache.create(module.config.layers, 2, 9)
    found, cache = module.run(weights_of({}), rows, FEATURES, empty)
    assert found is FEATURES and cache is empty and cache.keys == ()


def test_heads_begin_with_what_the_target_says_of_its_next_token():
    """And with little of the embeddings; a gradient reaches everything."""
    module = HydraHeads(HydraConfig.for_target(MODEL.config, num_heads=2, num_layers=2))
    params = module.initialise(jax.random.key(0), lm_head=TABLE)
    assert params["lm_heads_0"]["weight"] is not TABLE  # training gives its buffers away
    np.testing.assert_array_equal(params["lm_heads_0"]["weight"], TABLE)
    np.testing.assert_array_equal(params["lm_heads_1"]["bias"], np.zeros(40))

    @partial(jax.jit, static_argnums=2)
    @partial(jax.grad, has_aux=True)
    def gradient(params, factor, depth):
        embedded = factor * TARGET_PARAMS["embed_tokens"]["weight"][: 6 * depth]
        embedded = embedded.reshape(2, 3, depth, 32)
        logits = module.logits_at(weights_of(params), depth, FEATURES, embedded)
        return jnp.sum(logits**2), logits

    expected = np.asarray(FEATURES) @ np.asarray(TABLE).T
    for depth in (1, 2):
        _, alone = gradient(params, 0.0, depth)
        np.testing.assert_allclose(alone, expected, atol=1e-5)
        slopes, logits = gradient(params, 1.0, depth)
        assert 0 < np.abs(logits - alone).max() < 0.2 * np.abs(expected).max()
        for name, leaves in slopes.items():  # training must not get stuck at zeros
            is_used = name.endswith(f"_{depth - 1}")
            assert all((np.abs(leaf).max() > 0) == is_used for leaf in jax.tree.leaves(leaves))


def test_random_params_have_the_dtype_asked_for():
    module = HydraHeads(HydraConfig.for_target(MODEL.config, has_prefix=True, num_heads=2))
    params = jax.jit(lambda key: module.initialise(key, jnp.bfloat16))(jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    first, second = (np.asarray(params[f"lm_heads_{n}"]["weight"], float) for n in range(2))
    assert (first != second).mean() > 0.9
    given = FEATURES.astype(jnp.bfloat16), EMBEDDED[:, :, :2].astype(jnp.bfloat16)
    logits = jax.eval_shape(lambda params: module.logits_at(weights_of(params), 2, *given), params)
    assert logits.dtype == jnp.float32


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
def test_there_must_be_heads_and_blocks_and_one_prefix_layer_at_most(changes):
    with pytest.raises(SpecjaxError, match=f"`{next(iter(changes))}` must be at least 1"):
        HydraConfig.for_target(MODEL.config, **changes)
    with pytest.raises(SpecjaxError, match="a Hydra head with 2 prefix layers is not supported"):
        HydraConfig(MODEL.config)
