"""Heads of Medusa, Hydra and EAGLE-3: their formulas, norms, and outputs before any training."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.models.cache import KVCache
from specjax.models.heads import HeadWeights
from specjax.models.heads.eagle3 import Eagle3Config, Eagle3Head
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


def test_heads_of_medusa_compute_what_the_formula_says():
    """Here with the target's LM head; `tests/training/cases.py` has heads with their own."""
    module = MedusaHeads(MedusaConfig.for_target(MODEL.config, 4, 2, False))
    params = drawn(module)

    @jax.jit
    def all_logits(params):
        depths = range(1, 5), (1, 2), (3,)
        return [module.logits(weights_of(params), FEATURES, some) for some in depths]

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

    @jax.jit
    def all_logits(params):
        inputs = ((n, FEATURES, EMBEDDED[:, :, :n]) for n in range(1, 5))
        return [module.logits_at(weights_of(params), *each) for each in inputs]

    for depth, logits in enumerate(all_logits(params), 1):
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


# ---- Norms of EAGLE-3.1: of the target's features, and of the output -----------------------------

ONE, ALL, EACH = np.float32([[1, 1, 1], [30, 30, 30], [1, 30, 0.1]])[..., None]  # factors of taps


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
    taps = numbers.normal(size=(3, 32)).astype(np.float32)
    draw = lambda leaf: 3.0 if leaf.ndim == 1 else 0.06 * numbers.normal(size=leaf.shape)  # noqa: E731
    shapes = jax.eval_shape(head.initialise, jax.random.key(0))
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, draw(leaf), jnp.float32), shapes)

    @jax.jit
    def draft(params, feature) -> list[jax.Array]:
        """Returns the outputs of chains of the head's own features."""
        cache, outputs = KVCache.create(head.config.layers, 3, 2), []
        for token in range(2):
            rows = causal_rows(jnp.full((3, 1), token), cache.length)
            feature, cache = head.run(weights_of(params), rows, feature, cache)
            cache = cache.advance(jnp.ones_like(cache.length))
            outputs.append(feature)
        return outputs

    first, second = draft(params, (taps * np.stack([ONE, ALL, EACH])).reshape(3, 1, -1))
    for row, factor in ((1, ALL), (2, EACH)):
        is_same = np.allclose(first[row], first[0], rtol=1e-2)
        assert is_same == any(factor is ignored for ignored in ignores)
    sizes = [float(np.sqrt(np.mean(output[0] ** 2))) for output in (first, second)]
    assert np.allclose(sizes, 3.0, rtol=1e-3) == ("norm_output" in norms)  # the norm's weights


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
    "module", [MedusaHeads(MedusaConfig(32, 40, num_heads=2)), HydraHeads(HYDRA(True, 2, 2))]
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
