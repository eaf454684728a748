"""Medusa's heads against the formula, and what they say before any training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.models.heads import HeadWeights
from specjax.models.heads.medusa import MedusaConfig, MedusaHeads
from tests.decoding.heads import medusa_logits
from tests.decoding.tiny import target
from tests.models.heads import drawn

MODEL, TARGET_PARAMS = target()
TABLE = MODEL.lm_head(TARGET_PARAMS)
FEATURES = jnp.asarray(np.random.default_rng(3).normal(size=(2, 3, 32)), jnp.float32)


def weights_of(params) -> HeadWeights:
    return HeadWeights(params, MODEL, TARGET_PARAMS)


@pytest.mark.parametrize("has_lm_heads", [True, False])
def test_heads_compute_what_the_formula_says(has_lm_heads):
    module = MedusaHeads(MedusaConfig.for_target(MODEL.config, 4, 2, has_lm_heads))
    params = drawn(module)
    assert ("lm_heads_0" in params) == has_lm_heads and module.config.num_layers == 2

    @jax.jit
    def all_logits(params):
        weights = weights_of(params)
        fewer = module.logits(weights, FEATURES, num_depths=2)
        return module.logits(weights, FEATURES), fewer, module.logits_at(weights, FEATURES, 3)

    logits, fewer, third = all_logits(params)
    assert logits.shape == (2, 3, 4, 40)
    for row in np.ndindex(2, 3):
        expected = medusa_logits(module, params, np.asarray(FEATURES[row]), np.asarray(TABLE))
        np.testing.assert_allclose(logits[row], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(fewer, logits[:, :, :2])
    np.testing.assert_array_equal(third, logits[:, :, 2])


def test_heads_begin_with_what_the_target_says_of_its_next_token():
    module = MedusaHeads(MedusaConfig.for_target(MODEL.config, num_heads=2))
    params = module.initialise(jax.random.key(0), lm_head=TABLE)
    assert params["lm_heads_0"]["weight"] is not TABLE  # training gives its buffers away

    logits = module.logits(weights_of(params), FEATURES)
    expected = MODEL.logits(TARGET_PARAMS, FEATURES)[:, :, None]
    np.testing.assert_array_equal(logits, np.broadcast_to(expected, logits.shape))

    def loss(params):
        return jnp.sum(module.logits(weights_of(params), FEATURES) ** 2)

    for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(params)):
        assert np.abs(leaf).max() > 0  # training must not get stuck at zeros


def test_random_params_are_those_of_the_module_in_the_dtype_asked_for():
    module = MedusaHeads(MedusaConfig(32, 40, num_heads=2))
    params = module.initialise(jax.random.key(0), jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    first, second = (np.asarray(params[f"lm_heads_{n}"]["weight"], float) for n in range(2))
    assert (first != second).mean() > 0.9
    np.testing.assert_allclose(first.std(), 0.02, rtol=0.1)
    logits = jax.eval_shape(
        lambda: module.logits(weights_of(params), FEATURES.astype(jnp.bfloat16))
    )
    assert logits.dtype == jnp.float32


@pytest.mark.parametrize("heads, layers, name", [(0, 1, "num_heads"), (1, 0, "num_layers")])
def test_there_must_be_heads_and_layers(heads, layers, name):
    with pytest.raises(SpecjaxError, match=f"`{name}` must be at least 1"):
        MedusaConfig(32, 40, heads, layers)
