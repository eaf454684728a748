"""GGUF files that we write: read again, they are the same model."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from benchmarks.peers.gguf_writer import check_writable_as_gguf, save_gguf
from specjax.core.errors import SpecjaxError
from specjax.models.config import Rope, TransformerConfig, Variant
from specjax.models.quantize import quantize_params
from specjax.models.transformer import Transformer

CONFIG = TransformerConfig(96, 32, 48, 2, 4, 2, 8, rms_norm_eps=2.0**-17)
LLAMA3 = Rope("llama3", 10000.0, 8.0, original_max_position_embeddings=64)


def random_params(config, dtype="float32"):
    """Values differ within every weight, norms and biases included."""
    numbers = np.random.default_rng(0)
    shapes = Transformer(config).initialise(jax.random.key(0))
    return jax.tree.map(lambda leaf: jnp.asarray(numbers.normal(size=leaf.shape), dtype), shapes)


@pytest.mark.parametrize(
    "changes, dtype",
    [
        ({"tie_word_embeddings": True}, "float32"),
        ({"attention_bias": True, "mlp_bias": True, "head_dim": 16}, "bfloat16"),
        ({"rope": Rope("linear", 500000.0, 4.0)}, "float16"),
        ({"rope": LLAMA3}, "float32"),
    ],
)
def test_what_is_written_is_read(tmp_path, changes, dtype):
    pytest.importorskip("gguf")
    config = replace(CONFIG, **changes)
    params = random_params(config, dtype)
    save_gguf(tmp_path / "m.gguf", config, params, dtype)
    found = specjax.load(tmp_path / "m.gguf", dtype=dtype, packed=False)
    assert found.tokenizer is None
    assert found.config == config
    jax.tree.map(np.testing.assert_array_equal, found.params, params)
    assert found.dtype == dtype


def test_matrices_are_written_in_8_bits(tmp_path):
    pytest.importorskip("gguf")
    params = random_params(CONFIG)
    save_gguf(tmp_path / "m.gguf", CONFIG, params, "Q8_0")
    found = specjax.load(tmp_path / "m.gguf", dtype="float32", packed=False).params
    jax.tree.map(partial(np.testing.assert_allclose, atol=0.02), found, params)
    embedding, norm = found["embed_tokens"]["weight"], found["norm"]["weight"]
    assert np.any(embedding != params["embed_tokens"]["weight"])
    np.testing.assert_array_equal(norm, params["norm"]["weight"])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "mistral"}, "only Llama models are written as GGUF, not 'mistral'"),
        ({"variant": Variant("gelu")}, "hidden_act 'gelu'$"),
        ({"rope": Rope("dynamic", factor=2.0)}, "RoPE of type 'dynamic'"),
    ],
)
def test_models_that_llama_cpp_cannot_run_are_rejected(changes, message):
    with pytest.raises(SpecjaxError, match=message):
        check_writable_as_gguf(replace(CONFIG, **changes), {})


def test_params_that_do_not_fit_are_rejected(tmp_path):
    packed = quantize_params(random_params(CONFIG), "int8")
    for params, message in ((packed, "quantised params"), ({}, "give the config of these params")):
        with pytest.raises(SpecjaxError, match=message):
            save_gguf(tmp_path / "m.gguf", CONFIG, params, "float32")
