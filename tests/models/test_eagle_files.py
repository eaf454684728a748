"""EAGLE heads from and to files, beside the published forward pass (`published_forward`)."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from specjax.core.errors import SpecjaxError
from specjax.models.cache import KVCache
from specjax.models.config import Rope, TransformerConfig
from specjax.models.families import config_from
from specjax.models.heads.eagle import EagleConfig, EagleHead
from specjax.models.heads.eagle_files import load_eagle, save_eagle
from specjax.models.heads.files import check_owner, read_about
from specjax.models.target import causal_rows
from tests.models import checkpoints

TARGET = config_from({"model_type": "llama"} | checkpoints.TINY | {"num_key_value_heads": 2})
WEIGHTS = "model.safetensors"
PUBLISHED_KEYS = {
    "fc.weight",
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.k_proj.weight",
    "layers.0.self_attn.v_proj.weight",
    "layers.0.self_attn.o_proj.weight",
    "layers.0.mlp.gate_proj.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.0.mlp.down_proj.weight",
    "layers.0.post_attention_layernorm.weight",
}
CONFIG_OF_AUTHORS = {  # the keys of their training configs, and no others
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 61,
}


def make_head(fc_bias: bool = False, **changes) -> EagleHead:
    config = EagleConfig.for_target(TARGET, fc_bias)
    return EagleHead(replace(config, layers=replace(config.layers, **changes)))


def random_params(head: EagleHead) -> dict:
    """Wide, biases and norms included, so that nothing is without effect."""
    leaves, tree = jax.tree.flatten(head.initialise(jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    drawn = [
        leaf + 0.2 * jax.random.normal(key, leaf.shape)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, drawn)


@pytest.fixture(scope="module")
def target_params() -> dict:
    return {"embed_tokens": {"weight": jax.random.normal(jax.random.key(2), (61, 32))}}


@pytest.fixture(scope="module", params=[False, True], ids=["plain fc", "fc with bias"])
def fc_bias(request) -> bool:
    return request.param


@pytest.fixture(scope="module")
def head(fc_bias) -> EagleHead:
    return make_head(fc_bias)


@pytest.fixture(scope="module")
def params(head) -> dict:
    return random_params(head)


@pytest.fixture
def saved(tmp_path) -> Path:
    """A good head without fc bias, for a test to damage."""
    head = make_head()
    save_eagle(tmp_path / "head", head, random_params(head), "float32", target=TARGET)
    return tmp_path / "head"


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def rewrite(folder: Path, **changes) -> None:
    """Sets tensors of the file; `...` removes one."""
    tensors = load_file(folder / WEIGHTS) | changes
    save_file({name: t for name, t in tensors.items() if t is not ...}, folder / WEIGHTS)


def assert_same(actual: dict, expected: dict) -> None:
    actual, expected = flatten_dict(actual, sep="."), flatten_dict(expected, sep=".")
    assert actual.keys() == expected.keys()
    for path, leaf in expected.items():
        assert actual[path].dtype == leaf.dtype
        np.testing.assert_array_equal(actual[path], leaf, err_msg=path)


def failure(folder: Path, target: TransformerConfig = TARGET) -> str:
    """The one-line message of a load that must fail."""
    with pytest.raises(SpecjaxError) as caught:
        load_eagle(folder, target, "float32")
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- Round trips -------------------------------------------------------------------------------


def test_what_is_saved_is_loaded(tmp_path, head, params):
    save_eagle(tmp_path / "head", head, params, "float32", target=TARGET)
    again, loaded = load_eagle(tmp_path / "head", TARGET, "float32")
    assert again.config == head.config
    assert_same(loaded, params)


def test_the_dtypes_of_file_and_params_are_chosen(tmp_path, head, params):
    save_eagle(tmp_path / "head", head, params, "bfloat16", target=TARGET)
    stored = load_file(tmp_path / "head" / WEIGHTS)
    assert {tensor.dtype for tensor in stored.values()} == {jnp.dtype("bfloat16")}
    assert config_of(tmp_path / "head")["torch_dtype"] == "bfloat16"
    _, loaded = load_eagle(tmp_path / "head", TARGET, "float32")
    rounded = jax.tree.map(lambda leaf: leaf.astype("bfloat16").astype("float32"), params)
    assert_same(loaded, rounded)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 2},
        {"attention_bias": True, "mlp_bias": True},
        {"rope": Rope("dynamic", rope_theta=5e3, factor=2.0), "max_position_embeddings": 32},
        {"rope": Rope("llama3", 5e5, 8.0, 1.0, 4.0, 32)},
    ],
    ids=["two layers", "biases", "dynamic", "llama3"],
)
@pytest.mark.parametrize("layout", ["eagle", "vllm", "sglang"])
def test_no_setting_is_lost_in_any_layout(tmp_path, changes, layout):
    head = make_head(layout == "sglang", **changes)
    params = random_params(head)
    save_eagle(tmp_path / "head", head, params, "float32", target=TARGET, layout=layout)
    again, loaded = load_eagle(tmp_path / "head", TARGET, "float32")
    assert again.config == head.config
    assert_same(loaded, params)


def test_a_head_of_mistral_looks_at_all_of_the_text(tmp_path):
    target = replace(TARGET, model_type="mistral", sliding_window=8)
    head = EagleHead(EagleConfig.for_target(target))
    save_eagle(tmp_path / "head", head, random_params(head), "float32", target=target)
    assert config_of(tmp_path / "head")["architectures"] == ["LlamaForCausalLM"]
    again, _ = load_eagle(tmp_path / "head", target, "float32")
    assert again.config.layers == replace(head.config.layers, model_type="llama")
    checkpoints.edit_config(tmp_path / "head", model_type="mistral", sliding_window=8)
    again, _ = load_eagle(tmp_path / "head", target, "float32")
    assert again.config.layers == head.config.layers


# ---- What others have published ----------------------------------------------------------------


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_heads_are_read_as_published(tmp_path, head, params, form, prefix, target_params):
    save_eagle(
        tmp_path / "ours", head, params, "float32", target=TARGET, target_params=target_params
    )
    extras = {
        "lm_head.weight": np.ones((61, 32), np.float32),
        "layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
    }
    tensors = load_file(tmp_path / "ours" / WEIGHTS) | extras
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG_OF_AUTHORS))
    tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    if form == "bin":
        torch = pytest.importorskip("torch")
        tensors = {name: torch.from_numpy(tensor.copy()) for name, tensor in tensors.items()}
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / WEIGHTS)
    again, loaded = load_eagle(folder, TARGET, "float32")
    assert again.config == head.config  # the bias of fc included, of which the config says nothing
    assert again.config.layers.rope == Rope(rope_theta=10000.0)
    assert_same(loaded, params)


def test_the_rotary_base_of_the_head_is_its_own(saved):
    target = replace(TARGET, rope=Rope(rope_theta=5e5))
    without = dict.fromkeys(("rope_theta", "rope_parameters", "rope_scaling"), ...)
    checkpoints.edit_config(saved, **without)
    assert load_eagle(saved, target, "float32")[0].config.layers.rope.rope_theta == 10000.0
    checkpoints.edit_config(saved, rope_theta=7e4)
    assert load_eagle(saved, target, "float32")[0].config.layers.rope.rope_theta == 7e4


def test_published_biases_of_attention_have_none_at_the_output(tmp_path):
    head = make_head(attention_bias=True)
    params = random_params(head)
    params["layers_0"]["self_attn"]["o_proj"]["bias"] = jnp.zeros(32)
    save_eagle(tmp_path / "head", head, params, "float32", target=TARGET)
    rewrite(tmp_path / "head", **{"layers.0.self_attn.o_proj.bias": ...})
    checkpoints.edit_config(tmp_path / "head", attention_bias=...)
    assert config_of(tmp_path / "head")["qkv_bias"] is True
    again, loaded = load_eagle(tmp_path / "head", TARGET, "float32")
    assert again.config == head.config
    assert_same(loaded, params)


def published_forward(
    folder: Path, embedding: np.ndarray, tokens: list[int], features: np.ndarray
) -> np.ndarray:
    """The head as published, in float64, from the names and values in its files."""
    config = config_of(folder)
    weights = {name: t.astype(np.float64) for name, t in load_file(folder / WEIGHTS).items()}
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    width, length = config["hidden_size"] // heads, len(tokens)
    frequencies = config["rope_theta"] ** (-np.arange(0, width, 2) / width)
    angles = np.tile(np.arange(length)[:, None] * frequencies, 2)  # slots count from 0

    def norm(x, name):
        mean_square = (x**2).mean(-1, keepdims=True)
        return weights[name] * x / np.sqrt(mean_square + config["rms_norm_eps"])

    def rotated(x):
        halves = np.concatenate([-x[..., width // 2 :], x[..., : width // 2]], -1)
        return x * np.cos(angles)[:, None] + halves * np.sin(angles)[:, None]

    def attention(x, name):
        query, key, value = (
            (x @ weights[f"{name}.{kind}_proj.weight"].T).reshape(length, -1, width)
            for kind in "qkv"
        )
        query, key = rotated(query), np.repeat(rotated(key), heads // groups, 1)
        scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(width)
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", shares, np.repeat(value, heads // groups, 1))
        return mixed.reshape(length, -1) @ weights[f"{name}.o_proj.weight"].T

    def feed_forward(x, name):
        gate, up = (x @ weights[f"{name}.{kind}_proj.weight"].T for kind in ("gate", "up"))
        return (gate / (1 + np.exp(-gate)) * up) @ weights[f"{name}.down_proj.weight"].T

    x = np.concatenate([embedding[tokens], features], -1) @ weights["fc.weight"].T
    x = x + weights.get("fc.bias", 0)
    for number in range(config["num_hidden_layers"]):
        layer = f"layers.{number}"
        normed = x if number == 0 else norm(x, f"{layer}.input_layernorm.weight")
        x = x + attention(normed, f"{layer}.self_attn")
        x = x + feed_forward(norm(x, f"{layer}.post_attention_layernorm.weight"), f"{layer}.mlp")
    return x


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_head_computes_what_the_published_code_computes(
    tmp_path, fc_bias, num_layers, target_params
):
    original = make_head(fc_bias, num_hidden_layers=num_layers)
    params = random_params(original)
    save_eagle(tmp_path / "head", original, params, "float32", target=TARGET)
    head, loaded = load_eagle(tmp_path / "head", TARGET, "float32")
    tokens = [5, 60, 3, 3, 17, 42]
    features = jax.random.normal(jax.random.key(3), (1, len(tokens), 32))
    rows = causal_rows(jnp.array([tokens]), jnp.zeros((1,), jnp.int32))
    cache = KVCache.create(head.config.layers, 1, len(tokens))
    actual, _ = head.run(loaded, target_params, rows, features, cache)
    embedding = np.asarray(target_params["embed_tokens"]["weight"], np.float64)
    expected = published_forward(
        tmp_path / "head", embedding, tokens, np.asarray(features[0], np.float64)
    )
    np.testing.assert_allclose(actual[0], expected, rtol=1e-5, atol=1e-5)


# ---- Layouts -----------------------------------------------------------------------------------


def test_the_authors_find_their_own_keys(tmp_path, head, params, fc_bias, target_params):
    save_eagle(
        tmp_path / "head", head, params, "float32", target=TARGET, target_params=target_params
    )
    stored = load_file(tmp_path / "head" / WEIGHTS)
    expected = PUBLISHED_KEYS | {"embed_tokens.weight"} | ({"fc.bias"} if fc_bias else set())
    assert stored.keys() == expected
    assert stored["fc.weight"].shape == (32, 64)
    np.testing.assert_array_equal(
        stored["embed_tokens.weight"], target_params["embed_tokens"]["weight"]
    )
    config = config_of(tmp_path / "head")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["bias"] is fc_bias
    assert config["num_hidden_layers"] == 1
    assert "specjax" not in config
    written = {name: config[name] for name in CONFIG_OF_AUTHORS if name in config}
    assert written == {name: CONFIG_OF_AUTHORS[name] for name in written} | {
        "torch_dtype": "float32"
    }


def test_without_the_target_no_embedding_is_written(saved):
    assert load_file(saved / WEIGHTS).keys() == PUBLISHED_KEYS


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_the_authors_read_a_rope_scaling_of_two_fields(tmp_path, kind):
    head = make_head(rope=Rope(kind, rope_theta=5e3, factor=2.0))
    save_eagle(tmp_path / "head", head, random_params(head), "float32", target=TARGET)
    config = config_of(tmp_path / "head")
    assert config["rope_scaling"] == {"type": kind, "factor": 2.0}
    assert config["rope_parameters"]["rope_type"] == kind
    assert load_eagle(tmp_path / "head", TARGET, "float32")[0].config == head.config


def test_vllm_gets_no_bias_of_fc(tmp_path, target_params):
    head = make_head(fc_bias=True)
    params = random_params(head)
    message = r"fc\.bias is not zero, and vLLM reads no bias of fc; train a head without fc bias"
    with pytest.raises(SpecjaxError, match=message):
        save_eagle(tmp_path / "no", head, params, "float32", target=TARGET, layout="vllm")
    assert not list(tmp_path.iterdir())
    params["fc"]["bias"] = jnp.zeros(32)
    save_eagle(
        tmp_path / "head",
        head,
        params,
        "float32",
        target=TARGET,
        target_params=target_params,
        layout="vllm",
    )
    assert load_file(tmp_path / "head" / WEIGHTS).keys() == PUBLISHED_KEYS | {"embed_tokens.weight"}
    config = config_of(tmp_path / "head")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["bias"] is False
    again, loaded = load_eagle(tmp_path / "head", TARGET, "float32")
    assert again.config == make_head().config
    del params["fc"]["bias"]
    assert_same(loaded, params)


def test_sglang_always_gets_a_bias_of_fc(tmp_path, head, params, fc_bias):
    save_eagle(tmp_path / "head", head, params, "float32", target=TARGET, layout="sglang")
    stored = load_file(tmp_path / "head" / WEIGHTS)
    assert stored.keys() == PUBLISHED_KEYS | {"fc.bias"}
    config = config_of(tmp_path / "head")
    assert config["architectures"] == ["LlamaForCausalLMEagle"]
    assert "bias" not in config  # SGLang would look for biases of the attention
    expected = params["fc"]["bias"] if fc_bias else np.zeros(32)
    np.testing.assert_array_equal(stored["fc.bias"], expected)
    again, _ = load_eagle(tmp_path / "head", TARGET, "float32")
    assert again.config == make_head(fc_bias=True).config


@pytest.mark.parametrize(
    "layout, own, expected",
    [("eagle", 48, 48), ("vllm", 48, 64), ("sglang", 48, 64), ("vllm", 80, 80)],
)
def test_servers_are_told_the_context_of_the_target(tmp_path, layout, own, expected):
    head = make_head(max_position_embeddings=own)
    params = random_params(head)
    save_eagle(tmp_path / "head", head, params, "float32", target=TARGET, layout=layout)
    assert config_of(tmp_path / "head")["max_position_embeddings"] == expected


# ---- What it was trained for -------------------------------------------------------------------


def test_about_travels_along(tmp_path, saved):
    about = {"target": "2x4x32-00c0ffee", "method": "hass", "recipe": {"steps": [1, 2]}}
    head, params = load_eagle(saved, TARGET, "float32")
    save_eagle(tmp_path / "about", head, params, "float32", target=TARGET, about=about)
    assert read_about(tmp_path / "about") == about
    assert load_eagle(tmp_path / "about", TARGET, "float32")[0].config == head.config
    assert read_about(saved) == {}


def test_a_head_of_another_target_is_told_by_its_fingerprint(tmp_path, saved):
    head, params = load_eagle(saved, TARGET, "float32")
    about = {"target": "ours"}
    save_eagle(tmp_path / "about", head, params, "float32", target=TARGET, about=about)
    check_owner(tmp_path / "about", "ours")
    check_owner(saved, "ours")  # which does not say
    message = r"about: this head was trained for target ours, but this one is theirs; give a head"
    with pytest.raises(SpecjaxError, match=message):
        check_owner(tmp_path / "about", "theirs")


def test_about_must_be_an_object(saved):
    checkpoints.edit_config(saved, specjax="hass")
    with pytest.raises(SpecjaxError, match="specjax 'hass' is not an object; check the config"):
        read_about(saved)


# ---- What is not loaded ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"draft_vocab_size": 32}, "describes an EAGLE-3 head, which has another architecture and"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "describes an EAGLE-3 head"),
        ({"architectures": ["Eagle3Speculator"]}, "describes an EAGLE-3 head"),
        ({"speculators_model_type": "eagle3"}, "is not supported; give an EAGLE, EAGLE-2 or HASS"),
        ({"speculators_model_type": "eagle"}, "a head of speculators (eagle), whose format is not"),
        ({"medusa_num_heads": 5}, "describes a Medusa head; give an EAGLE, EAGLE-2 or HASS head"),
        ({"model_type": "medusa"}, "describes a Medusa head"),
        ({"hydra_num_heads": 4}, "describes a Hydra head"),
        ({"model_type": "qwen2"}, ": model_type 'qwen2' is not supported"),
        ({"hidden_size": 64}, "for a target of hidden size 64, but this one has 32; give a head"),
        ({"vocab_size": 60}, "for a target of vocabulary 60, but this one has 61; give a head"),
        ({"vocab_size": ...}, ": config.json has no 'vocab_size'"),
        ({"bias": "yes"}, ": bias 'yes' is not true or false; check the config"),
        ({"qkv_bias": "yes"}, ": attention_bias 'yes' is not true or false; check the config"),
        ({"bias": True}, "says that fc has a bias, but the weights hold no fc.bias; set it to"),
    ],
)
def test_configs_that_are_refused(saved, changes, told):
    checkpoints.edit_config(saved, **changes)
    message = failure(saved)
    assert message.startswith(str(saved / "config.json"))
    assert told in message


def test_a_bias_that_the_config_denies_is_refused(saved):
    rewrite(saved, **{"fc.bias": np.ones(32, np.float32)})
    message = failure(saved)
    assert message.startswith(f"{saved / 'config.json'}: bias says that fc has no bias, but the")
    assert message.endswith("set it to true there, or download the head again")
    checkpoints.edit_config(saved, bias=True)
    head, params = load_eagle(saved, TARGET, "float32")
    assert head.config.fc_bias
    np.testing.assert_array_equal(params["fc"]["bias"], np.ones(32))


NORM = np.ones(32, np.float32)


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"fc.weight": np.ones((32, 96), np.float32)}, "holds an EAGLE-3 head, which has another"),
        ({"midlayer.hidden_norm.weight": NORM}, "holds an EAGLE-3 head"),
        ({"layers.0.hidden_norm.weight": NORM}, "holds an EAGLE-3 head"),
        ({"d2t": np.zeros(9, np.int64)}, "holds an EAGLE-3 head"),
        ({"t2d": np.zeros(61, bool)}, "is not supported; give an EAGLE, EAGLE-2 or HASS head"),
        ({"fc.weight": ..., "model.norm.weight": NORM}, "holds a whole model; give an EAGLE"),
        ({"fc.weight": ..., "layers.0.input_layernorm.weight": NORM}, "holds a whole model"),
        ({"fc.weight": ...}, "missing: fc.weight; check that both belong together"),
        ({"layers.0.input_layernorm.weight": NORM}, "unexpected: layers.0.input_layernorm.weight;"),
        ({"norm.weight": NORM}, "unexpected: norm.weight;"),
        ({"layers.0.self_attn.q_proj.bias": NORM}, "unexpected: layers.0.self_attn.q_proj.bias;"),
        ({"fc.weight": NORM}, "wrong shape: fc.weight is (32,), expected (32, 64);"),
        (
            {"fc.weight": np.ones((32, 64), np.int8)},
            "quantised weights are not supported: fc.weight (I8); use a checkpoint stored as F64",
        ),
    ],
)
def test_weights_that_are_refused(saved, changes, told):
    rewrite(saved, **changes)
    message = failure(saved)
    assert message.startswith(str(saved))
    assert told in message


def test_all_that_does_not_fit_is_told_at_once(saved):
    checkpoints.edit_config(saved, num_hidden_layers=2, intermediate_size=40)
    message = failure(saved)
    assert "missing: layers.1.input_layernorm.weight, layers.1.mlp.down_proj.weight" in message
    assert "wrong shape: layers.0.mlp.down_proj.weight is (32, 48), expected (32, 40)" in message


@pytest.mark.parametrize(
    "name, content, told",
    [
        ("config.json", None, "holds no config.json; give the folder of an EAGLE head"),
        ("config.json", b"{", "config.json is not valid JSON"),
        ("config.json", b"[]", "config.json does not hold a JSON object; fix it"),
        (WEIGHTS, None, "holds no weights (model.safetensors or"),
        (WEIGHTS, b"cut", "is damaged or cut short"),
    ],
)
def test_missing_and_damaged_files_are_named(saved, name, content, told):
    (saved / name).unlink()
    if content is not None:
        (saved / name).write_bytes(content)
    assert told in failure(saved)


def test_a_folder_that_must_not_be_read_is_named(saved, monkeypatch):
    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    assert "config.json cannot be read (Permission denied); check the path" in failure(saved)


# ---- What is not saved -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"layout": "trt"}, "layout 'trt' is unknown; choose eagle, vllm, sglang"),
        ({"target": replace(TARGET, vocab_size=60)}, "a target of vocabulary 61, but this one has"),
        ({"head": make_head(fc_bias=True)}, "missing: fc.bias; give the head of these params"),
        (
            {"target_params": {"embed_tokens": {"weight": np.ones((60, 32), np.float32)}}},
            r"wrong shape: embed_tokens.weight is (60, 32), expected (61, 32)",
        ),
    ],
)
def test_what_does_not_belong_together_is_not_saved(tmp_path, changes, told):
    head = make_head()
    arguments = {"head": head, "params": head.initialise(jax.random.key(0)), "target": TARGET}
    with pytest.raises(SpecjaxError, match=re.escape(told)):
        save_eagle(tmp_path / "head", dtype="float32", **arguments | changes)
    assert not list(tmp_path.iterdir())


def test_a_failed_save_leaves_nothing_behind(tmp_path, saved, monkeypatch):
    head, params = load_eagle(saved, TARGET, "float32")

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("specjax.models.io.huggingface.save_file", fail)
    with pytest.raises(SpecjaxError, match="No space left on device"):
        save_eagle(tmp_path / "out", head, params, "float32", target=TARGET)
    with pytest.raises(SpecjaxError, match="already exists and is not an empty folder"):
        save_eagle(saved, head, params, "float32", target=TARGET)
    assert [path.name for path in tmp_path.iterdir()] == ["head"]
