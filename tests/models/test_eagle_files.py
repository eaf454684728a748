"""Rules of EAGLE's files alone: its layouts, and the forward pass as published."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.models.cache import KVCache
from specjax.models.config import Rope
from specjax.models.heads import HeadWeights
from specjax.models.heads.eagle import EagleHead
from specjax.models.target import causal_rows
from specjax.models.transformer import Transformer
from tests.models.checkpoints import edit_config
from tests.models.heads import (
    HEADS,
    TARGET,
    TARGET_PARAMS,
    TIED,
    assert_loads,
    assert_same,
    config_of,
    drawn,
    literal_layer,
    load,
    params_of,
    published,
    rewrite,
    save,
    stored,
    write,
)

EMBEDDING = {"embed_tokens.weight": np.asarray(TARGET_PARAMS["embed_tokens"]["weight"])}
ZEROS = np.zeros(32, np.float32)


def with_layers(name: str = "eagle", **changes) -> EagleHead:
    config = HEADS[name].config
    return EagleHead(replace(config, layers=replace(config.layers, **changes)))


# ---- Layouts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eagle", "eagle, fc bias"])
@pytest.mark.parametrize("layout", ["eagle", "vllm", "sglang"])
def test_the_embedding_and_a_bias_of_fc_are_as_the_reader_wants_them(tmp_path, name, layout):
    """vLLM knows no bias of fc, SGLang no fc without one."""
    params = params_of(name)
    if name == "eagle, fc bias" and layout == "vllm":
        with pytest.raises(SpecjaxError, match=r"fc\.bias is not zero, and vLLM reads no bias of"):
            save(tmp_path / "head", name, layout)
        assert not list(tmp_path.iterdir())
        params = params | {"fc": params["fc"] | {"bias": jnp.zeros(32)}}
    folder = save(tmp_path / "head", name, layout, params=params)
    expected = published(name) | EMBEDDING
    if layout == "vllm":
        expected.pop("fc.bias", None)
        expected.pop("embed_tokens.weight")
    if layout == "sglang":
        expected.setdefault("fc.bias", ZEROS)
    assert_same(stored(folder), expected)
    config = config_of(folder)
    suffix = "Eagle" if layout == "sglang" else ""
    assert config["architectures"] == [f"LlamaForCausalLM{suffix}"]
    says = {"eagle": name != "eagle", "vllm": False}  # SGLang takes it for one of the attention
    assert config.get("bias") == says.get(layout)
    wanted = "eagle, fc bias" if "fc.bias" in expected else "eagle"
    assert load(folder, "eagle")[0].config == HEADS[wanted].config


def test_sglang_replaces_embedding_and_lm_head_one_by_one(tmp_path):
    """It deletes the weights of both, and the second is gone if they are one."""
    head = with_layers(tie_word_embeddings=True)
    config = config_of(save(tmp_path / "head", "eagle", "sglang", head=head, **TIED))
    weights = {"embed_tokens"} if config["tie_word_embeddings"] else {"embed_tokens", "lm_head"}
    for name in ("embed_tokens", "lm_head"):
        weights.remove(name)
    assert config["vocab_size"] == 61  # of the LM head that it makes meanwhile


def test_the_authors_read_a_rope_scaling_of_two_fields(tmp_path):
    head = with_layers(rope=Rope("linear", rope_theta=5e3, factor=2.0))
    folder = save(tmp_path / "head", "eagle", head=head)
    assert config_of(folder)["rope_scaling"] == {"type": "linear", "factor": 2.0}
    assert config_of(folder)["rope_parameters"]["rope_type"] == "linear"
    assert load(folder, "eagle")[0].config == head.config


@pytest.mark.parametrize(
    "layout, own, expected",
    [("eagle", 48, 48), ("sglang", 48, 64), ("vllm", 80, 80)],
)
def test_servers_get_the_context_of_the_target(tmp_path, layout, own, expected):
    head = with_layers(max_position_embeddings=own)
    folder = save(tmp_path / "head", "eagle", layout, head=head)
    assert config_of(folder)["max_position_embeddings"] == expected


# ---- What others have published ----------------------------------------------------------------


def test_the_prefix_of_servers_is_left_out(tmp_path):
    config = config_of(save(tmp_path / "ours", "eagle, fc bias"))
    tensors = published("eagle, fc bias") | EMBEDDING
    prefixed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    folder = write(tmp_path / "theirs", config, prefixed, "model.safetensors")
    assert_loads(folder, "eagle, fc bias")


def test_the_rotary_base_of_the_head_is_its_own(tmp_path):
    folder, target = save(tmp_path / "head", "eagle"), replace(TARGET, rope=Rope(rope_theta=5e5))
    edit_config(folder, rope_theta=..., rope_parameters=..., rope_scaling=...)
    assert load(folder, "eagle", target)[0].config.layers.rope == Rope(rope_theta=10000.0)
    edit_config(folder, rope_theta=7e4)
    assert load(folder, "eagle", target)[0].config.layers.rope == Rope(rope_theta=7e4)


def test_published_biases_of_attention_have_none_at_the_output(tmp_path):
    head = with_layers(attention_bias=True)
    params = drawn(head)
    params["layers_0"]["self_attn"]["o_proj"]["bias"] = jnp.zeros(32)
    folder = save(tmp_path / "head", "eagle", head=head, params=params)
    rewrite(folder, **{"layers.0.self_attn.o_proj.bias": ...})
    edit_config(folder, attention_bias=...)
    assert config_of(folder)["qkv_bias"] is True
    again, loaded = load(folder, "eagle")
    assert again.config == head.config
    assert_same(loaded, params)


@pytest.mark.parametrize("name, num_layers", [("eagle", 1), ("eagle, fc bias", 2)])
def test_a_head_computes_what_the_published_code_computes(tmp_path, name, num_layers):
    original = with_layers(name, num_hidden_layers=num_layers)
    folder = save(tmp_path / "head", name, head=original, params=drawn(original))
    head, loaded = load(folder, "eagle")
    tokens, target = [5, 60, 3, 3, 17, 42], Transformer(TARGET)
    features = jax.random.normal(jax.random.key(3), (1, len(tokens), 32))
    rows = causal_rows(jnp.array([tokens]), jnp.zeros((1,), jnp.int32))
    inputs = rows, features, KVCache.create(head.config.layers, 1, len(tokens))
    run = jax.jit(lambda params: head.run(HeadWeights(params, target, TARGET_PARAMS), *inputs))
    actual, _ = run(loaded)
    weights = {name: tensor.astype(np.float64) for name, tensor in stored(folder).items()}
    x = np.concatenate([weights["embed_tokens.weight"][tokens], features[0]], -1)
    x = x @ weights["fc.weight"].T + weights.get("fc.bias", 0)
    for number in range(num_layers):
        layer, visible = loaded[f"layers_{number}"], np.tri(len(tokens), dtype=bool)
        expected = x = literal_layer(head.config.layers, layer, x, visible)
    np.testing.assert_allclose(actual[0], expected, rtol=1e-5, atol=1e-5)
