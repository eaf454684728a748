"""Quantised targets: weights of whole numbers with scales, drafting for them, and training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import load
from specjax.core.errors import SpecjaxError
from specjax.core.memory import device_bytes
from specjax.decoding.drafter import Params, Proposal
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.decoding.drafters.eagle2 import Eagle2
from specjax.decoding.generate import speculative_generate
from specjax.decoding.sampling import Draw, Sampling, sequence_keys
from specjax.decoding.tree import DraftTree
from specjax.decoding.widths import verify_pass
from specjax.models.fingerprint import FrozenModel, fingerprint
from specjax.models.heads.eagle3 import Eagle3Config, Eagle3Head
from specjax.models.heads.medusa import MedusaConfig, MedusaHeads
from specjax.models.io.huggingface import load_transformer, save_transformer
from specjax.models.products import lookup, project
from specjax.models.quantize import (
    QuantizedWeight,
    compute_dtype,
    dequantized,
    quantize,
    quantize_params,
)
from specjax.models.target import causal_rows
from specjax.training.heads import new_params
from tests.decoding.heads import EAGLE2, MEDUSA, eagle_head, narrowed
from tests.decoding.tiny import prompt, target

KINDS = ("int8", "int4")
TOLERANCE = {"int8": 0.01, "int4": 0.2}  # of a row's outputs, relative to their size


def uneven(inputs: int = 192) -> jax.Array:
    """A matrix whose rows differ 100 times in size, and are apart from the columns."""
    weight = np.random.default_rng(0).normal(size=(192, inputs))
    return jnp.asarray(weight * np.logspace(-2, 0, 192)[:, None], jnp.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_within_half_a_step_or_one_beyond_the_greatest(kind):
    weight, span = uneven(inputs=180), jnp.iinfo(kind)
    found = quantize(weight, kind, jnp.float32)
    assert found.scale.shape == (192, 1 if kind == "int8" else 6)  # groups of 30, not 32
    step = np.repeat(found.scale, 180 // found.scale.shape[1], axis=1)
    codes = np.asarray(found.codes).astype(int)
    bound = np.where(codes == span.max, 1, 0.5) * 1.0001
    assert np.all(np.abs(dequantized(found) - weight) <= bound * np.abs(step))
    assert np.all(np.min(codes.reshape(*found.scale.shape, -1), axis=-1) == span.min)
    assert device_bytes(found.codes) == weight.size // (1 if kind == "int8" else 2)
    zeros = quantize(jnp.zeros((192, 180)), kind, jnp.float32)
    assert not np.any(dequantized(zeros))


@pytest.mark.parametrize("kind, dtype", [("int8", jnp.bfloat16), ("int4", jnp.float32)])
def test_products_lookups_and_gradients_are_those_of_the_dequantised_weight(kind, dtype):
    weight, bound = uneven(), 6 * TOLERANCE[kind]
    found = quantize(weight, kind, dtype)
    x = np.random.default_rng(1).normal(size=(5, 192)).astype(dtype)
    size = np.linalg.norm(weight, axis=1)[None, :]  # of each row's outputs

    @jax.jit
    def product_and_slope(x, weight):
        def loss(x):
            product = project(x, weight, jnp.float32)
            return jnp.sum(product / size), product

        slope, product = jax.grad(loss, has_aux=True)(x)
        return product, slope, lookup(weight, jnp.array([[3, 100], [191, 0]]))

    (product, slope, rows), (_, expected_slope, expected_rows) = (
        product_and_slope(x, each) for each in (found, dequantized(found))
    )
    wanted = x.astype(np.float32) @ np.asarray(weight).T
    assert np.all(np.abs(product - wanted) < bound * size)
    np.testing.assert_array_equal(rows, expected_rows)
    np.testing.assert_allclose(slope, expected_slope, rtol=0.03, atol=0.1)


def test_logits_are_near_those_of_the_floats():
    model, params = target()
    few = quantize_params(params, "int8")
    model.check(few)
    assert fingerprint(model.config, few) == fingerprint(model.config, params)
    rows = causal_rows(prompt(1).tokens, jnp.zeros(1, int))

    @jax.jit
    def logits(*both):
        run = lambda params: model.run(params, rows, model.new_cache(params, 1, 64))  # noqa: E731
        return [run(params)[0].logits for params in both]

    plain, own = logits(params, few)
    assert np.linalg.norm(own - plain) < 3 * TOLERANCE["int8"] * np.linalg.norm(plain)


def test_a_gpu_multiplies_a_single_row_by_quantised_weights_alone():
    """And need not write the weights as floats first; others multiply it among several."""
    model, params = target()
    few = jax.eval_shape(
        lambda: quantize_params(jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params), "int8")
    )
    one = jnp.zeros((1, 1), jnp.int32)
    tree = DraftTree(one, one - 1, one, one == 0)
    draw = Draw(sequence_keys(jax.random.key(0), 1), jnp.ones(1, jnp.int32), Sampling())

    @jax.jit
    def one_pass(few):
        cache = model.new_cache(few, 1, 16)
        return verify_pass(model, Autoregressive(), few, cache, Proposal(tree, None), draw)

    traced = one_pass.trace(few)
    programs = {
        name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("cuda", "tpu")
    }
    assert "tensor<8x32xbf16>" in programs["tpu"]
    assert "tensor<8x32xbf16>" not in programs["cuda"]


@pytest.mark.slow
@pytest.mark.parametrize("kind, headed", [("int8", EAGLE2), ("int4", MEDUSA)])
def test_every_drafter_gives_the_text_of_the_quantised_target(kind, headed):
    """With a draft vocabulary, too, whose rows of the LM head are quantised."""
    model, params = target()
    few = quantize_params(params, kind)

    def text(drafter, params=None, target_params=few):
        return speculative_generate(
            Params(target_params, params),
            prompt(2),
            jax.random.key(1),
            target=model,
            drafter=drafter,
            sampling=Sampling(temperature=0.7),
            max_new_tokens=32,
        ).tokens

    plain = text(Autoregressive())
    head, narrow = narrowed(eagle_head())
    few_tokens = Eagle2(head, top_k=3, depth=3, num_tokens=12)
    for drafter, own in [headed.pair, (few_tokens, narrow)]:
        np.testing.assert_array_equal(text(drafter, own), plain)
    if kind == "int4":  # it is a different model
        assert jnp.any(text(Autoregressive(), target_params=params) != plain)


def test_heads_start_with_the_target_s_lm_head():
    model, params = target()
    few = quantize_params(params, "int8")
    frozen = FrozenModel(model, few)
    table = dequantized(model.lm_head(few))
    medusa = MedusaHeads(MedusaConfig.for_target(model.config, 1))
    own = new_params(medusa, frozen, 0, {})
    np.testing.assert_array_equal(own["lm_heads_0"]["weight"], table)
    own = new_params(Eagle3Head(Eagle3Config.for_target(model.config)), frozen, 0, {})
    np.testing.assert_array_equal(own["lm_head"]["weight"], table)


def test_weights_are_quantised_as_they_are_read(tmp_path):
    model, params = target()
    save_transformer(tmp_path / "model", model.config, params, jnp.float32)
    loaded = load(tmp_path / "model", "bfloat16", quantize="int8", packed=False)
    assert loaded.dtype == jnp.bfloat16 and loaded.dtype_name == "int8 (bfloat16)"
    assert compute_dtype(loaded.dtype_name) == compute_dtype("bfloat16") == "bfloat16"
    matrix, norm = loaded.params["layers_0"]["mlp"]["up_proj"]["weight"], loaded.params["norm"]
    assert isinstance(matrix, QuantizedWeight) and norm["weight"].dtype == jnp.bfloat16
    assert fingerprint(model.config, loaded.params) == fingerprint(model.config, params)
    read = load_transformer(tmp_path / "model", model.config, jnp.float32, quantize="int4")
    wanted = quantize_params(params, "int4")
    assert jax.tree.structure(read) == jax.tree.structure(wanted)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, read, wanted)))
    with pytest.raises(SpecjaxError, match="the params are quantised; load them as floats"):
        save_transformer(tmp_path / "copy", model.config, loaded.params, jnp.float32)
    with pytest.raises(SpecjaxError, match="quantize 'int2' is not supported; use int8 or int4"):
        load("pocket", quantize="int2")
