from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.models import attention
from specjax.models.cache import KVCache
from specjax.models.families import config_from, read_config
from specjax.models.heads.training_attention import training_attention
from specjax.models.io.huggingface import load_transformer
from specjax.models.target import ModelOutput, QueryRows, Taps, causal_rows
from specjax.models.transformer import Transformer
from tests.models import checkpoints
from tests.models.heads import drawn

TEXT_LENGTH = 24
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
CASES = {
    "llama, short text": {
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rope_parameters": DYNAMIC,
    },
    "llama, long text": {"max_position_embeddings": 16, "rope_parameters": DYNAMIC},
    "llama, biases, linear rope": checkpoints.LINEAR | {"attention_bias": True, "mlp_bias": True},
    "llama3 rope, wide heads": {
        "num_key_value_heads": 1,
        "head_dim": 12,
        "rms_norm_eps": 1e-5,
        "rope_parameters": checkpoints.LLAMA3 | {"rope_type": "llama3", "rope_theta": 1e4},
    },
    "mistral, window": {"kind": "mistral", "num_key_value_heads": 2, "sliding_window": 6},
    **{kind: {"kind": kind} | settings for kind, settings in checkpoints.FAMILIES.items()},
    "qwen2, window above": checkpoints.WINDOW
    | {"kind": "qwen2", "use_sliding_window": True, "max_window_layers": 1},
    "gemma3_text, scaled": checkpoints.WINDOW
    | {"kind": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gpt_bigcode, unscaled": checkpoints.GPT_BIGCODE
    | {"kind": "gpt_bigcode", "scale_attn_weights": False, "tie_word_embeddings": False},
    "phi3, long": checkpoints.FAMILIES["phi3"]
    | {"kind": "phi3", "original_max_position_embeddings": 16},
    "phi3, partial": {"kind": "phi3", "partial_rotary_factor": 0.75, "pad_token_id": 0},
}


@partial(jax.jit, static_argnames=("model", "taps"))
def run(params, rows: QueryRows, cache: KVCache, *, model: Transformer, taps: Taps = Taps()):
    return model.run(params, rows, cache, taps)


def run_whole(model: Transformer, params, tokens, taps: Taps = Taps()) -> ModelOutput:
    """One pass over whole texts `[B, Q]`: the reference of every other way to run them."""
    tokens = jnp.asarray(tokens)
    cache = KVCache.create(model.config, *tokens.shape)
    start = jnp.zeros(len(tokens), jnp.int32)
    return run(params, causal_rows(tokens, start), cache, model=model, taps=taps)[0]


def random_tokens(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).integers(3, 61, shape).astype(np.int32)


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_computes_what_transformers_does(tmp_path, name):
    """Logits, hidden states and attention of one text."""
    pytest.importorskip("torch")
    model = checkpoints.build(**CASES[name])
    folder = checkpoints.save(tmp_path / "checkpoint", model)
    config = read_config(folder)
    params = load_transformer(folder, config, jnp.float32)
    tokens = random_tokens((2, TEXT_LENGTH))
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    taps = Taps(tuple(range(layers + 1)), tuple(np.ndindex(layers, heads)))
    ours = run_whole(Transformer(config), params, tokens, taps)
    theirs = checkpoints.forward(model, tokens)
    logits = theirs.logits.numpy()
    assert np.abs(logits).max() > 1  # weights wide enough to tell right from wrong
    np.testing.assert_allclose(ours.logits, logits, atol=1e-4, rtol=0)
    hidden = np.stack([layer.numpy() for layer in theirs.hidden_states], axis=2)
    np.testing.assert_allclose(ours.hidden, hidden, atol=1e-4, rtol=0)
    attention = np.concatenate([layer.numpy() for layer in theirs.attentions], axis=1)
    assert attention.max(axis=-1)[..., 8:].mean() > 0.2  # uniform: 0.06
    np.testing.assert_allclose(ours.attention, attention, atol=1e-5, rtol=0)


WINDOW = CASES["mistral, window"] | {
    "model_type": "mistral",
    "layer_types": ["sliding_attention", "full_attention"],
}


def target(**settings: Any) -> tuple[Transformer, dict]:
    """A model with wide random params, made without torch."""
    model = Transformer(config_from({"model_type": "llama"} | checkpoints.TINY | settings))
    return model, drawn(model)


@pytest.fixture(scope="module")
def windowed() -> tuple[Transformer, dict]:
    return target(**WINDOW)


def empty_cache(model: Transformer, batch: int) -> KVCache:
    """A cache of 40 slots for prompts of up to `TEXT_LENGTH` tokens."""
    return KVCache.create(model.config, batch, 40, prompt_length=TEXT_LENGTH)


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, atol=2e-5, rtol=0)


def tree_rows(batch: int, count: int, lengths: Any, seed: int) -> QueryRows:
    """Nodes of random trees behind texts of these lengths; each sees its ancestors and itself."""
    numbers = np.random.default_rng(seed)
    visible = np.zeros((batch, count, count), bool)
    for text, node in np.ndindex(batch, count):
        parent = numbers.integers(-1, node)
        if parent >= 0:
            visible[text, node] = visible[text, parent]
        visible[text, node, node] = True
    positions = np.reshape(lengths, (-1, 1)) + visible.sum(axis=-1) - 1
    tokens = numbers.integers(0, 61, (batch, count))
    return QueryRows(*map(jnp.asarray, (tokens, positions, visible)))


@pytest.mark.parametrize("way", [WINDOW, CASES["llama, long text"]])
def test_a_tree_row_equals_its_path_run_alone(way):
    model, params = target(**way)
    tokens, lengths = random_tokens((2, TEXT_LENGTH)), (5, 9)
    cache = empty_cache(model, 2)
    prompts = causal_rows(jnp.asarray(tokens), cache.length)
    cache = run(params, prompts, cache, model=model)[1].advance(jnp.array(lengths))
    rows = tree_rows(2, 10, lengths, seed=0)
    output, _ = run(params, rows, cache, model=model)
    nodes, visible = np.asarray(rows.tokens), np.asarray(rows.visible)
    for node in range(10):
        paths = [
            [*tokens[text, :length], *nodes[text, visible[text, node]]]
            for text, length in enumerate(lengths)
        ]
        padded = [np.pad(path, (0, TEXT_LENGTH - len(path))) for path in paths]
        logits = run_whole(model, params, np.stack(padded)).logits
        ends = np.array([len(path) - 1 for path in paths])
        assert_close(output.logits[:, node], logits[jnp.arange(2), ends])


def test_only_what_is_tapped_comes_back(windowed):
    model, params = windowed
    tokens = random_tokens((1, TEXT_LENGTH))
    of_taps = lambda *taps: run_whole(model, params, tokens, Taps(*taps))  # noqa: E731
    nothing = jax.eval_shape(lambda: of_taps((), (), False))
    assert nothing.logits is nothing.hidden is nothing.attention is None
    some = of_taps((2, 0), ((1, 3),))
    every = of_taps((0, 1, 2), tuple(np.ndindex(2, 4)))
    assert_close(some.hidden, every.hidden[:, :, jnp.array([2, 0])])
    assert_close(some.attention, every.attention[:, 7:8])


@pytest.mark.parametrize("taps", [Taps((3,)), Taps((), ((0, 4),)), Taps((), ((2, 0),))])
def test_a_tap_that_the_model_lacks_is_refused(windowed, taps):
    with pytest.raises(SpecjaxError, match="does not exist: the model has layers 0 to"):
        taps.check(windowed[0].config)


def test_sixteen_bit_params_give_float32_logits_near_the_true_ones(windowed):
    (model, params), dtype = windowed, jnp.bfloat16
    tokens = random_tokens((2, TEXT_LENGTH))
    narrow = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    cache = KVCache.create(model.config, 2, TEXT_LENGTH, dtype)
    output, cache = run(narrow, causal_rows(jnp.asarray(tokens), cache.length), cache, model=model)
    assert output.logits.dtype == jnp.float32
    assert cache.keys[0].dtype == dtype
    expected = run_whole(model, params, tokens).logits
    assert jnp.abs(output.logits - expected).mean() < 0.05 * jnp.abs(expected).mean()


def random_arrays(shapes) -> list[jax.Array]:
    numbers = np.random.default_rng(0)
    return [jnp.asarray(numbers.normal(size=shape), jnp.float32) for shape in shapes]


def test_attention_in_blocks_is_attention_at_once(monkeypatch):
    shapes = [(2, 4, 12, 8), *[(2, 2, 12, 8)] * 4]
    query, *others = random_arrays(shapes)
    visible = jnp.asarray(np.broadcast_to(np.tri(12, dtype=bool), (2, 12, 12)))
    is_near = jnp.asarray(np.random.default_rng(1).random((2, 12)) < 0.5)

    def both(query, keys, values, near_keys, near_values):
        near = [((near_keys, near_values), is_near)]
        mixed, weights = attention.attend(query, keys, values, visible)
        trained = training_attention(query, (keys, values), visible, near)
        return jnp.sum(mixed**2) + jnp.sum(trained**3), (mixed, weights, trained)

    def read(*given):
        values = jax.value_and_grad(both, argnums=(0, 1, 2, 3, 4), has_aux=True)
        return jax.jit(lambda *given: values(*given))(*given)

    at_once = read(query, *others)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 4)
    assert "scan" in str(jax.make_jaxpr(both)(query, *others))
    in_blocks = read(query, *others)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), in_blocks, at_once)


def test_attention_to_blocks_of_slots_is_attention_to_all(monkeypatch):
    monkeypatch.setattr(attention, "KEY_BLOCK", 64)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 3)
    shapes = [(2, 4, 6, 8), (2, 2, 72, 8), (2, 2, 72, 8)]
    query, *stored = random_arrays(shapes)
    at = np.asarray([[61], [63]]) + np.arange(6)  # the slots of the rows
    distance = at[:, :, None] - np.arange(72)
    visible = (distance >= 0) & (distance < 5)  # none of the first block, for some
    read = jax.jit(attention.attend_to_blocks, static_argnums=(5, 6))
    found = read(query, *stored, visible, jnp.asarray(69), 0.5, 3.0)
    at_once = jax.jit(attention.attend, static_argnums=(4, 5))
    assert_close(found, at_once(query, *stored, visible, 0.5, 3.0)[0])
    longer = [np.pad(each, ((0, 0), (0, 0), (0, 67), (0, 0))) for each in stored]
    seen = np.pad(visible, ((0, 0), (0, 0), (0, 67)))
    np.testing.assert_array_equal(read(query, *longer, seen, jnp.asarray(139), 0.5, 3.0), found)


def test_prefill_of_a_long_cache_reads_it_in_blocks(monkeypatch, windowed):
    model, params = windowed
    tokens, taps = jnp.asarray(random_tokens((2, TEXT_LENGTH))), Taps((-1,), logits=False)

    def read():
        cache = empty_cache(model, 2)
        return jax.jit(
            lambda params: model.run(params, causal_rows(tokens, cache.length), cache, taps)
        ).lower(params)

    at_once = read().compile()(params)
    monkeypatch.setattr(attention, "KEY_BLOCK", 16)
    in_blocks = read()
    assert "while" in in_blocks.as_text()
    jax.tree.map(assert_close, in_blocks.compile()(params), at_once)
