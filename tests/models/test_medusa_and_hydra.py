"""Heads of Medusa and Hydra against the formulas, and what they say before any training."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.models.cache import KVCache
from specjax.models.heads import HeadWeights
from specjax.models.heads.hydra import HydraConfig, HydraHeads
from specjax.models.heads.medusa import MedusaConfig, MedusaHeads
from specjax.models.target import causal_rows
from tests.decoding.heads import hydra_logits, medusa_logits
from tests.decoding.tiny import target
from tests.models.heads import drawn, literal_layer, literal_norm

MODEL, TARGET_PARAMS = target()
TABLE = TARGET_PARAMS["lm_head"]["weight"]
NUMBERS = np.random.default_rng(3)
FEATURES = jnp.asarray(NUMBERS.normal(size=(2, 3, 32)), jnp.float32)
EMBEDDED = jnp.asarray(NUMBERS.normal(size=(2, 3, 4, 32)), jnp.float32)
HYDRA = partial(HydraConfig.for_target, MODEL.config)


def weights_of(params) -> HeadWeights:
    return HeadWeights(params, MODEL, TARGET_PARAMS)


# ---- The formulas --------------------------------------------------------------------------------


@pytest.mark.parametrize("has_lm_heads", [True, False])
def test_heads_of_medusa_compute_what_the_formula_says(has_lm_heads):
    module = MedusaHeads(MedusaConfig.for_target(MODEL.config, 4, 2, has_lm_heads))
    params = drawn(module)
    assert ("lm_heads_0" in params) == has_lm_heads

    @jax.jit
    def all_logits(params):
        weights = weights_of(params)
        depths = range(1, 5), (1, 2), (3,)
        return [module.logits(weights, FEATURES, some) for some in depths]

    logits, fewer, third = all_logits(params)
    for row in np.ndindex(2, 3):
        expected = medusa_logits(module, params, np.asarray(FEATURES[row]), np.asarray(TABLE))
        np.testing.assert_allclose(logits[row], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(fewer, logits[:, :, :2])
    np.testing.assert_array_equal(third, logits[:, :, 2:3])


@pytest.mark.parametrize("has_lm_heads", [True, False])
def test_heads_of_hydra_compute_what_the_formula_says(has_lm_heads):
    module = HydraHeads(HYDRA(False, 4, 3, has_lm_heads))
    params = drawn(module)
    assert ("lm_heads_0" in params) == has_lm_heads

    @jax.jit
    def logits_of(params, features, embedded):
        weights, depths = weights_of(params), range(1, 5)
        return [module.logits_at(weights, n, features, embedded[:, :, :n]) for n in depths]

    for depth, logits in enumerate(logits_of(params, FEATURES, EMBEDDED), 1):
        for row in np.ndindex(2, 3):
            feature, tokens = FEATURES[row], EMBEDDED[row][:depth]
            expected = hydra_logits(module, params, feature, tokens, np.asarray(TABLE))
            np.testing.assert_allclose(logits[row], expected, rtol=1e-4, atol=1e-4)


def test_the_prefix_layer_computes_what_the_formula_says():
    module = HydraHeads(HYDRA(True, 1, 1))
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


# ---- Before training -----------------------------------------------------------------------------


def test_heads_of_medusa_begin_with_what_the_target_says_of_its_next_token():
    module = MedusaHeads(MedusaConfig.for_target(MODEL.config, num_heads=2))
    params = module.initialise(jax.random.key(0), lm_head=TABLE)
    assert params["lm_heads_0"]["weight"] is not TABLE  # training gives its buffers away

    logits = module.logits(weights_of(params), FEATURES, (1, 2))
    expected = MODEL.logits(TARGET_PARAMS, FEATURES)[:, :, None]
    np.testing.assert_array_equal(logits, np.broadcast_to(expected, logits.shape))

    def loss(params):
        return jnp.sum(module.logits(weights_of(params), FEATURES, (1, 2)) ** 2)

    for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(params)):
        assert np.abs(leaf).max() > 0  # training must not get stuck at zeros


def test_heads_of_hydra_begin_with_what_the_target_says_of_its_next_token():
    """And with little of the embeddings; a gradient reaches everything."""
    module = HydraHeads(HYDRA(num_heads=2, num_layers=2))
    params = module.initialise(jax.random.key(0), lm_head=TABLE)
    assert params["lm_heads_0"]["weight"] is not TABLE  # training gives its buffers away

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


@pytest.mark.parametrize(
    "module", [MedusaHeads(MedusaConfig(32, 40, num_heads=2)), HydraHeads(HYDRA(True, 2))]
)
def test_random_params_have_the_dtype_asked_for_and_logits_are_float32(module):
    params = jax.jit(lambda key: module.initialise(key, jnp.bfloat16))(jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    first, second = (np.asarray(params[f"lm_heads_{n}"]["weight"], float) for n in range(2))
    assert (first != second).mean() > 0.9
    features, embedded = (each.astype(jnp.bfloat16) for each in (FEATURES, EMBEDDED[:, :, :2]))

    def logits_of(params):
        if isinstance(module, MedusaHeads):
            return module.logits(weights_of(params), features, (2,))
        return module.logits_at(weights_of(params), 2, features, embedded)

    assert jax.eval_shape(logits_of, params).dtype == jnp.float32


@pytest.mark.parametrize("kind", [HYDRA, partial(MedusaConfig.for_target, MODEL.config)])
@pytest.mark.parametrize("name", ["num_heads", "num_layers"])
def test_there_must_be_heads_and_blocks_and_one_prefix_layer_at_most(kind, name):
    with pytest.raises(SpecjaxError, match=f"`{name}` must be at least 1"):
        kind(**{name: 0})
    with pytest.raises(SpecjaxError, match="a Hydra head with 2 prefix layers is not supported"):
        HydraConfig(MODEL.config)
