import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from specjax.core.errors import SpecjaxError
from specjax.models.config import Rope, TransformerConfig
from specjax.models.families import FAMILIES, config_from, config_values, read_config
from tests.models import checkpoints
from tests.models.checkpoints import LLAMA3, TINY

LINEAR, DYNAMIC = ({"type": kind, "factor": 2.0} for kind in ("linear", "dynamic"))
LONG = {"type": "longrope"} | checkpoints.LONG
PATTERN = ["full_attention", "sliding_attention"]
GPT_BIGCODE = {"model_type": "gpt_bigcode"} | checkpoints.GPT_BIGCODE
MISTRAL = {"model_type": "mistral", "num_key_value_heads": 4}
PHI3 = {"model_type": "phi3"}
HALF = PHI3 | {"partial_rotary_factor": 0.5}


def values_of(**changes) -> dict:
    """The content of a small `config.json`; the value `...` removes a key."""
    values = {"model_type": "llama"} | TINY | changes
    return {name: value for name, value in values.items() if value is not ...}


def read(folder, **changes) -> TransformerConfig:
    (folder / "config.json").write_text(json.dumps(values_of(**changes)))
    return read_config(folder)


@pytest.mark.parametrize(
    ("key", "kind", "settings"),
    [
        ("type", "linear", {"factor": 2.0}),
        ("rope_type", "dynamic", {"factor": 4.0}),
        ("type", "llama3", LLAMA3),
    ],
)
def test_both_spellings_of_rope_read_the_same(tmp_path, key, kind, settings):
    new = read(tmp_path, rope_parameters={"rope_type": kind, "rope_theta": 5e5} | settings)
    old = read(tmp_path, rope_theta=5e5, rope_scaling={key: kind} | settings)
    assert new == old
    assert new.rope == Rope(rope_type=kind, rope_theta=5e5, **settings)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 1, "tie_word_embeddings": True, "eos_token_id": [2, 7]},
        {"head_dim": 12, "attention_bias": True, "mlp_bias": True, "eos_token_id": None},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | LLAMA3},
        {"rope_scaling": DYNAMIC},
        *({"model_type": kind} | settings for kind, settings in checkpoints.FAMILIES.items()),
        {"model_type": "mistral", "sliding_window": 6, "layer_types": PATTERN},
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1},
        {"model_type": "gemma2", "query_pre_attn_scalar": 20, "attn_logit_softcapping": None},
        {"model_type": "gemma3_text", "rope_scaling": LINEAR},
        GPT_BIGCODE | {"scale_attn_weights": False},
        {"model_type": "starcoder2", "use_bias": False, "hidden_act": "gelu"},
        PHI3 | {"rope_scaling": LONG, "original_max_position_embeddings": 16},
        PHI3 | {"partial_rotary_factor": 1.0},
        HALF,
    ],
)
def test_a_written_config_reads_back_as_it_was(tmp_path, changes):
    config = read(tmp_path, **changes)
    assert config_from(json.loads(json.dumps(config_values(config)))) == config


def test_absent_fields_mean_what_transformers_takes_them_for(tmp_path):
    absent = dict.fromkeys(("num_key_value_heads", "max_position_embeddings", "bos_token_id"), ...)
    config = read(tmp_path, eos_token_id=..., sliding_window=6, **absent)
    assert config.sliding_window is None  # which only Mistral's counts
    assert config.num_key_value_heads == config.num_attention_heads == 4
    assert config.head_dim == 8
    assert (config.rms_norm_eps, config.rope.rope_theta) == (1e-6, 10000.0)
    assert (config.bos_token_id, config.eos_token_id) == (1, (2,))
    assert read(tmp_path, model_type="qwen2", eos_token_id=...).eos_token_id == ()
    mistral = read(tmp_path, model_type="mistral", num_attention_heads=16, **absent)
    assert (mistral.num_key_value_heads, mistral.sliding_window) == (8, 4096)
    assert mistral.max_position_embeddings == 131072
    null = read(tmp_path, model_type="mistral", num_key_value_heads=None, sliding_window=None)
    assert (null.num_key_value_heads, null.sliding_window) == (4, None)


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_stretched_rope_allows_texts_longer_by_its_factor(tmp_path, kind):
    for factor, longest in ((2.0, 128), (1e308, 2**31 - 1)):
        config = read(tmp_path, rope_scaling={"type": kind, "factor": factor})
        assert config.longest_text == longest
        gemma = {"model_type": "gemma3_text", "rope_scaling": {"type": kind, "factor": factor}}
        assert read(tmp_path, **gemma).longest_text == 64  # which counts the factor already
    assert read(tmp_path, rope_scaling={"rope_type": "llama3"} | LLAMA3).longest_text == 64


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_a_rotation_is_float32_whatever_the_default_of_jax(kind):
    with jax.enable_x64(True):
        lengths = jnp.arange(1, 9, dtype=jnp.int32)[None]
        assert Rope(kind, factor=2.0).inverse_frequencies(16, 4, lengths).dtype == jnp.float32


def test_keys_that_transformers_ignores_have_no_effect(tmp_path):
    plain = read(tmp_path, rope_scaling=LINEAR)
    assert read(tmp_path, rope_scaling=LINEAR | {"attention_factor": 2.0}) == plain
    gemma = read(tmp_path, model_type="gemma3_text", attn_logit_softcapping=2.0)
    assert gemma.variant.attn_logit_softcapping is None


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'.* specjax supports llama, mistral"),
        ({"hidden_act": "relu2"}, "'relu2'.*supports silu, gelu, gelu_pytorch_tanh"),
        ({"quantization_config": {"quant_method": "gptq"}}, "weights quantised by gptq are not"),
        ({"num_local_experts": 8}, "num_local_experts 8: experts.*use a dense model"),
        ({"model_type": "gemma3", "text_config": {}}, "'gemma3' is not supported .its text model"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_att"),
        ({"model_type": "gpt_bigcode", "num_hidden_layers": ...}, "no 'n_layer', which a gpt_big"),
        ({"model_type": "gpt_bigcode", "multi_query": False}, "multi_query"),
        (PHI3 | {"rope_scaling": LONG | {"long_factor": [1.0]}}, "LongRoPE has 1 entries for 4"),
        (PHI3 | {"rope_scaling": LONG | {"long_factor": None}}, "needs 'long_factor'.*add it to"),
        ({"hidden_size": ...}, "no 'hidden_size', which a llama model needs"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"hidden_size": 189, "num_attention_heads": 7}, "head_dim 27 is odd"),
        ({"rms_norm_eps": "1e-6"}, "`rms_norm_eps` must be a number, got '1e-6'"),
        ({"mlp_bias": "no"}, "`mlp_bias` must be true or false, got 'no'"),
        (MISTRAL | {"layer_types": PATTERN * 2}, "layer_types has 4 entries for 2 layers"),
        (MISTRAL | {"layer_types": ["linear"] * 2}, "`layer_types` must be sliding_attention or"),
        ({"bos_token_id": [1]}, "`bos_token_id` must be a whole number or None"),
        ({"rope_scaling": "linear"}, "rope_scaling 'linear' is not an object"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "`factor` must be a number, got '2'"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "needs 'low_freq_factor'"),
        ({"rope_scaling": {"type": "yarn"}}, "'yarn'.*default, linear, dynamic"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor.*full rotary heads"),
        (HALF | {"rope_scaling": LONG, "head_dim": 18}, "LongRoPE has 4 entries for 5 rotated"),
        (PHI3 | {"partial_rotary_factor": 1.5}, "must be above 0 and at most 1, got 1.5"),
        ({"head_dim": 2, "rope_scaling": DYNAMIC}, "at least 2 rotated pairs"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"max_position_embeddings": 2**31}, "`max_position_embeddings` must be at least 1 and at"),
    ],
)
def test_unsupported_configs_are_rejected_with_a_reason(tmp_path, changes, wrong):
    with pytest.raises(SpecjaxError, match=wrong) as error:
        read(tmp_path, **changes)
    assert str(tmp_path / "config.json") in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (b'{"model_type": ', "not valid JSON"),
        (b"[]", "object"),
        (b'{"a": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", r"is not valid JSON \(.*recursion"),
    ],
)
def test_a_damaged_config_is_named(tmp_path, content, wrong):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(SpecjaxError, match=f"config.json .*{wrong}.*; fix it or download it again"):
        read_config(tmp_path)


def test_an_unreadable_config_is_named(tmp_path, monkeypatch):
    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    read(tmp_path)
    for reading in ("open", "is_file"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, reading, refuse)
            with pytest.raises(SpecjaxError, match=r"config\.json cannot be read \(Permission den"):
                read_config(tmp_path)


@pytest.mark.parametrize("given", [{"model_type": "llama"}, GPT_BIGCODE])
def test_a_size_that_no_model_has_is_refused_at_once(given):
    for name in ("num_hidden_layers", "vocab_size", "hidden_size"):
        key = FAMILIES[given["model_type"]].keys.get(name, name)
        with pytest.raises(SpecjaxError, match=f"`{name}` must be .* at most .*got 1000000000000"):
            config_from(values_of(**given | {key: 10**12}))
