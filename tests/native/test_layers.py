"""Native layers compute what Flax's do, and a token's bits whatever stands beside it."""

from dataclasses import replace
from functools import cache
from itertools import cycle, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.core.errors import SpecjaxError
from specjax.models import (
    KVCache,
    QueryRows,
    Rope,
    Taps,
    Transformer,
    TransformerConfig,
    causal_rows,
    native,
)
from specjax.models.config import FULL, SLIDING, Variant
from specjax.models.heads import HeadWeights
from specjax.models.heads.eagle3 import Eagle3Config, Eagle3Head
from specjax.models.quantize import KINDS, dequantized, is_stored, quantize, quantize_params
from specjax.models.target import ModelOutput
from tests.decoding.tiny import slow_except
from tests.models.heads import drawn
from tests.models.test_transformer import tree_rows

pytestmark = pytest.mark.skipif(
    not native.is_available(), reason="specjax has no native kernels here"
)
SETS = native.instruction_sets()
KEY = jax.random.key(0)
TAPS = Taps((0, 1, 2), ((1, 3), (0, 0)))
LLAMA = TransformerConfig(61, 48, 80, 2, 4, 2, 16)
GEMMA = Variant(
    hidden_act="gelu_pytorch_tanh",
    norm="rms_plus_one",
    has_qk_norm=True,
    has_post_norms=True,
    query_pre_attn_scalar=20.0,
    attn_logit_softcapping=5.0,
    sliding_rope=Rope(rope_theta=100.0),
)
STARCODER = Variant(hidden_act="gelu", has_gate=False, norm="layer", layers_without_rope=(1,))
CONFIGS = {
    "llama": LLAMA,
    "biases, one head to each key": replace(
        LLAMA, attention_bias=True, mlp_bias=True, num_key_value_heads=4
    ),
    "gemma": replace(
        LLAMA, variant=GEMMA, sliding_window=6, layer_types=(SLIDING, FULL), head_dim=32
    ),
    "starcoder": replace(LLAMA, variant=STARCODER, attention_bias=True, mlp_bias=True),
    "learned positions": replace(LLAMA, variant=Variant(has_learned_positions=True)),
    "partial rope": replace(LLAMA, rope=Rope(partial_rotary_factor=0.625)),
}


def run(
    model: Transformer, params: Any, batch: int, count: int, taps: Taps, length: int = 21
) -> ModelOutput:
    """Reads a text as prefill does, then nodes behind it."""

    @jax.jit
    def passes(params):
        tokens = jax.random.randint(jax.random.key(1), (batch, length), 0, 61)
        cache = model.new_cache(params, batch, length + count + 5)
        text = causal_rows(tokens, cache.length)
        _, cache = model.run(params, text, cache, Taps(logits=False))
        cache = cache.advance(jnp.full(batch, length))
        return model.run(params, tree_rows(batch, count, length, 7), cache, taps)[0]

    return passes(params)


def assert_close(output: ModelOutput, expected: ModelOutput, tolerance: float) -> None:
    for part, exact in zip(jax.tree.leaves(output), jax.tree.leaves(expected), strict=True):
        scale = np.abs(np.asarray(exact, np.float32)).max(initial=1e-6)
        np.testing.assert_allclose(
            np.asarray(part, np.float32) / scale,
            np.asarray(exact, np.float32) / scale,
            atol=tolerance,
        )


@cache
def of_flax(name: str) -> tuple[Transformer, Any, ModelOutput]:
    """Returns a model, its params and what Flax computes with them."""
    model, params = Transformer(CONFIGS[name]), drawn(Transformer(CONFIGS[name]))
    return model, params, run(model, params, 2, 9, TAPS)


@pytest.mark.parametrize(
    ("name", "instructions"),
    slow_except(product(CONFIGS, SETS), *zip(CONFIGS, cycle(SETS), strict=False)),
)
def test_native_layers_are_those_of_flax(monkeypatch, name, instructions):
    model, params, expected = of_flax(name)
    monkeypatch.setenv(native.SWITCH, instructions)
    assert_close(run(model, native.pack_params(params), 2, 9, TAPS), expected, 2e-5)


@pytest.mark.parametrize("dtype", slow_except(["bfloat16", "float16"], "bfloat16"))
def test_layers_of_16_bits_are_near_the_true_ones(monkeypatch, dtype):
    """With caches of either kind: of float32, and of the params' own dtype."""
    params = drawn(Transformer(LLAMA), dtype)
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, "float32"), params)
    expected, packed = run(Transformer(LLAMA), exact, 1, 5, Taps()), native.pack_params(params)
    tolerance = 0.05 if dtype == "bfloat16" else 0.01
    for instructions in SETS:
        monkeypatch.setenv(native.SWITCH, instructions)
        for cached in ("float32", None):
            output = run(Transformer(LLAMA, cached), packed, 1, 5, Taps())
            assert_close(output, expected, tolerance)


@pytest.mark.parametrize("kind", slow_except(["int8", "int4"], "int4"))
def test_layers_with_quantised_weights_are_near_those_of_xla(monkeypatch, kind):
    """With a head of 48 and an inner size of 144, whose last block is half as long."""
    model = Transformer(replace(LLAMA, head_dim=48, intermediate_size=144))
    params = quantize_params(drawn(model, "bfloat16"), kind)
    packed, wide = native.pack_params(params), jax.tree.map(dequantized, params, is_leaf=is_stored)
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, "float32"), wide)
    assert native.has_native_layers(packed, 48)
    expected = run(model, exact, 2, 9, Taps())
    for instructions in SETS:
        monkeypatch.setenv(native.SWITCH, instructions)
        assert_close(run(model, packed, 2, 9, Taps()), expected, 0.05)


def test_layers_of_which_some_are_quantised_run_in_xla():
    model = Transformer(LLAMA)
    params = native.pack_params(drawn(model))
    down = params["layers_1"]["mlp"]["down_proj"]
    down["weight"] = native.packed(quantize(dequantized(down["weight"]), "int8", "float32"))
    assert not native.has_native_layers(params, LLAMA.head_dim)
    wide = jax.tree.map(dequantized, params, is_leaf=is_stored)
    assert_close(run(model, params, 1, 5, Taps()), run(model, wide, 1, 5, Taps()), 1e-4)


@pytest.mark.slow
@given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.sampled_from([16, 32, 48]),
    st.integers(1, 3),
    st.integers(1, 128),
    st.sampled_from(SETS),
)
@settings(max_examples=12, deadline=None)
def test_layers_of_odd_shapes(hidden, inner, head_dim, batch, count, instructions):
    shape = {"hidden_size": hidden, "intermediate_size": inner, "head_dim": head_dim}
    # The norm of a single small number would magnify its rounding by 1 / sqrt(eps).
    model = Transformer(replace(LLAMA, **shape, rms_norm_eps=0.01))
    params = drawn(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(native.SWITCH, instructions)
        output = run(model, native.pack_params(params), batch, count, Taps((1,)))
    assert_close(output, run(model, params, batch, count, Taps((1,))), 1e-4)


def test_a_head_with_norms_of_both_halves_runs_natively():
    head = Eagle3Head(Eagle3Config(replace(LLAMA, num_hidden_layers=1), (0, 1)))
    params, target = drawn(head), Transformer(LLAMA)
    target_params = drawn(target)
    rows = tree_rows(1, 6, 0, 3)
    features = jax.random.normal(KEY, (1, 6, 96))

    @jax.jit
    def output(params):
        cache = KVCache.create(head.config.layers, 1, 16)
        return head.run(HeadWeights(params, target, target_params), rows, features, cache)[0]

    np.testing.assert_allclose(output(native.pack_params(params)), output(params), atol=1e-4)


def test_packed_layers_have_no_gradients():
    model = Transformer(LLAMA)
    plain = drawn(model)
    params = native.pack_params(plain)

    def loss(table):
        rows = causal_rows(jnp.zeros((1, 2), jnp.int32), jnp.zeros(1, jnp.int32))
        cache = model.new_cache(params, 1, 8)
        output, _ = model.run(params | {"embed_tokens": {"weight": table}}, rows, cache)
        return output.logits.sum()

    with pytest.raises(SpecjaxError, match="packed=False"):
        jax.eval_shape(jax.grad(loss), plain["embed_tokens"]["weight"])


@pytest.mark.parametrize("instructions", SETS)
def test_nan_reaches_the_nodes_that_see_it_and_no_others(monkeypatch, instructions):
    monkeypatch.setenv(native.SWITCH, instructions)
    model = Transformer(replace(LLAMA, num_hidden_layers=1, sliding_window=4))
    params = native.pack_params(drawn(model))
    rows = tree_rows(1, 12, 20, 5)
    cache = model.new_cache(params, 1, 40)
    cache = replace(cache, length=jnp.array([20]), positions=jnp.arange(40)[None])
    run = jax.jit(model.run)
    for slot in (16, 18):
        keys = cache.keys[0].at[:, :, slot].set(jnp.nan)
        output, _ = run(params, rows, replace(cache, keys=(keys,)))
        is_seen = np.asarray(rows.positions[0]) - slot < 4
        is_nan = np.isnan(np.asarray(output.logits[0]))
        assert 0 < is_seen.sum() < 12 or slot == 16
        np.testing.assert_array_equal(is_nan, np.repeat(is_seen[:, None], 61, axis=1))


def test_a_window_shorter_than_a_pass_does_not_change_a_token():
    """The first tokens that a query sees are in its own pass, or were committed before it."""
    model = Transformer(replace(LLAMA, num_hidden_layers=1, sliding_window=5))
    params = native.pack_params(drawn(model))
    tokens, passes = jax.random.randint(KEY, (1, 24), 0, 61), jax.jit(model.run)
    cache, parts = model.new_cache(params, 1, 24), []
    whole, _ = passes(params, causal_rows(tokens, cache.length), cache)
    for at in range(24):
        output, cache = passes(params, causal_rows(tokens[:, at : at + 1], cache.length), cache)
        cache = cache.advance(jnp.ones(1, jnp.int32))
        parts.append(output.logits)
    np.testing.assert_array_equal(whole.logits, jnp.concatenate(parts, axis=1))


@pytest.mark.parametrize("batch", [1, 2])
def test_tokens_beyond_the_count_are_not_computed(batch):
    model = Transformer(TransformerConfig(128, 192, 256, 2, 3, 1, 64))
    params, run = native.pack_params(drawn(model, "float32")), jax.jit(model.run, static_argnums=3)
    tokens, taps = jnp.arange(6 * batch).reshape(batch, 6), Taps((1,), ((1, 2),))

    def among(width, count):
        cache, start = model.new_cache(params, batch, 16), jnp.array([3, 0])[:batch]
        rows = causal_rows(tokens[:, :width], start, None if count is None else jnp.array(count))
        return run(params, rows, replace(cache, length=start), taps)

    (output, cache), (narrow, narrow_cache) = among(6, 4), among(4, None)
    for part, whole in zip(jax.tree.leaves(narrow), jax.tree.leaves(output), strict=True):
        axis = next(axis for axis in range(part.ndim) if part.shape[axis] != whole.shape[axis])
        first, rest = np.split(whole, [4], axis=axis)
        np.testing.assert_array_equal(first, part)
        np.testing.assert_array_equal(rest, 0)
    for kept, others in ((cache.keys, narrow_cache.keys), (cache.values, narrow_cache.values)):
        for part, whole in zip(kept, others, strict=True):
            np.testing.assert_array_equal(part, whole)


DTYPES = ("bfloat16", "float16", "float32", "int8", "int4")
QUICK = {"Avx512": "float16", "Avx2": "float32"}  # the others have bfloat16


@pytest.mark.parametrize(
    ("instructions", "dtype"),
    slow_except(
        product(SETS, DTYPES),
        (SETS[0], "int8"),
        *((each, QUICK.get(each, "bfloat16")) for each in SETS),
    ),
)
def test_a_token_does_not_depend_on_the_tokens_beside_it(monkeypatch, instructions, dtype):
    monkeypatch.setenv(native.SWITCH, instructions)
    shape, num_slots = (128, 192, 256, 2, 3, 1, 64), 384
    if dtype in KINDS:
        shape = (128, 192, 144, 2, 4, 2, 48)  # a head and the inner size end within a block
    model = Transformer(TransformerConfig(*shape))
    params = drawn(model, "bfloat16" if dtype in KINDS else dtype)
    params = native.pack_params(quantize_params(params, dtype) if dtype in KINDS else params)
    assert native.has_native_layers(params, model.config.head_dim)
    numbers, run = np.random.default_rng(0), jax.jit(model.run)
    blank = model.new_cache(params, 1, num_slots)
    cache = jax.tree.map(
        lambda leaf: jnp.asarray(numbers.normal(size=leaf.shape), leaf.dtype), blank
    )
    positions = jnp.arange(num_slots)[None]
    cache = replace(cache, positions=positions, prompt_length=blank.prompt_length)
    tokens = numbers.integers(0, 128, 60)

    def path_among(count: int, path: list[int], length: int) -> jax.Array:
        """Returns the logits of a path, always of the same tokens, among `count` rows."""
        others = np.setdiff1d(np.arange(count), path)
        visible = np.eye(count, dtype=bool)
        for depth, row in enumerate(path):
            visible[row, path[:depth]] = True
        order = np.argsort(np.concatenate([path, others]))
        positions = np.full(count, length)
        positions[path] += np.arange(len(path))
        parts = (tokens[:count][order], positions, visible)
        rows = QueryRows(*(jnp.asarray(each[None]) for each in parts))
        now = replace(cache, length=jnp.array([length]))
        output, _ = run(params, rows, now)
        return output.logits[0, np.array(path)]

    def root_in_nine(length: int) -> jax.Array:
        """Returns the root's logits from nine copies of the text, each with that row alone."""
        now = replace(cache, length=jnp.array([length]))
        now = jax.tree.map(lambda leaf: jnp.repeat(leaf, 9, axis=0), now)
        output, _ = run(params, causal_rows(jnp.full((9, 1), tokens[0]), now.length), now)
        return output.logits[:, 0]

    for length in (100, 127, 128, 129, 190, 257, 300):
        alone = path_among(8, [0, 1, 2, 3, 4, 5], length)
        np.testing.assert_array_equal(root_in_nine(length), np.repeat(alone[:1], 9, axis=0))
        for count in (3, 58):
            ways = numbers.choice(np.arange(1, count), min(5, count - 1), replace=False)
            path = [0, *sorted(ways.tolist())]
            np.testing.assert_array_equal(path_among(count, path, length), alone[: len(path)])
