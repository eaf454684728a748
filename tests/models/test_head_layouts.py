"""Rules of the files of one kind of head alone: its layouts, and its published code."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.models.cache import KVCache
from specjax.models.config import Rope
from specjax.models.heads import HeadWeights
from specjax.models.target import causal_rows
from specjax.models.transformer import Transformer
from tests.models import heads
from tests.models.checkpoints import edit_config
from tests.models.heads import HEADS, TARGET, TIED, assert_same, config_of, load, published, save

EMBEDDING = {"embed_tokens.weight": np.asarray(heads.TARGET_PARAMS["embed_tokens"]["weight"])}
ZEROS = np.zeros(32, np.float32)


# ---- EAGLE -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eagle", "eagle, fc bias"])
@pytest.mark.parametrize("layout", ["eagle", "vllm", "sglang"])
def test_the_embedding_and_a_bias_of_fc_are_as_the_reader_wants_them(tmp_path, name, layout):
    """vLLM knows no bias of fc, SGLang no fc without one."""
    params = heads.params_of(name)
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
    assert_same(heads.stored(folder), expected)
    config = config_of(folder)
    suffix = "Eagle" if layout == "sglang" else ""
    assert config["architectures"] == [f"LlamaForCausalLM{suffix}"]
    says = {"eagle": name != "eagle", "vllm": False}  # SGLang takes it for one of the attention
    assert config.get("bias") == says.get(layout)
    wanted = "eagle, fc bias" if "fc.bias" in expected else "eagle"
    assert load(folder, "eagle")[0].config == HEADS[wanted].config


def test_sglang_replaces_embedding_and_lm_head_one_by_one(tmp_path):
    """It deletes the weights of both, and the second is gone if they are one."""
    head = heads.with_layers("eagle", tie_word_embeddings=True)
    config = config_of(save(tmp_path / "head", "eagle", "sglang", head=head, **TIED))
    weights = {"embed_tokens"} if config["tie_word_embeddings"] else {"embed_tokens", "lm_head"}
    for name in ("embed_tokens", "lm_head"):
        weights.remove(name)
    assert config["vocab_size"] == 61  # of the LM head that it makes meanwhile


@pytest.mark.parametrize(
    "layout, own, expected",
    [("eagle", 48, 48), ("sglang", 48, 64), ("vllm", 80, 80)],
)
def test_servers_get_the_context_of_the_target(tmp_path, layout, own, expected):
    head = heads.with_layers("eagle", max_position_embeddings=own)
    folder = save(tmp_path / "head", "eagle", layout, head=head)
    assert config_of(folder)["max_position_embeddings"] == expected


def test_the_prefix_of_servers_is_left_out(tmp_path):
    config = config_of(save(tmp_path / "ours", "eagle, fc bias"))
    tensors = published("eagle, fc bias") | EMBEDDING
    prefixed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    folder = heads.write(tmp_path / "theirs", config, prefixed, "model.safetensors")
    heads.assert_loads(folder, "eagle, fc bias")


def test_the_rotary_base_of_the_head_is_its_own(tmp_path):
    folder, target = save(tmp_path / "head", "eagle"), replace(TARGET, rope=Rope(rope_theta=5e5))
    edit_config(folder, rope_theta=..., rope_parameters=..., rope_scaling=...)
    assert load(folder, "eagle", target)[0].config.layers.rope == Rope(rope_theta=10000.0)
    edit_config(folder, rope_theta=7e4)
    assert load(folder, "eagle", target)[0].config.layers.rope == Rope(rope_theta=7e4)


def test_published_biases_of_attention_have_none_at_the_output(tmp_path):
    head = heads.with_layers("eagle", attention_bias=True)
    params = heads.drawn(head)
    params["layers_0"]["self_attn"]["o_proj"]["bias"] = jnp.zeros(32)
    folder = save(tmp_path / "head", "eagle", head=head, params=params)
    heads.rewrite(folder, **{"layers.0.self_attn.o_proj.bias": ...})
    edit_config(folder, attention_bias=...)
    assert config_of(folder)["qkv_bias"] is True
    again, loaded = load(folder, "eagle")
    assert again.config == head.config
    assert_same(loaded, params)


@pytest.mark.parametrize("name, num_layers", [("eagle", 1), ("eagle, fc bias", 2)])
def test_a_head_computes_what_the_published_code_computes(tmp_path, name, num_layers):
    original = heads.with_layers(name, num_hidden_layers=num_layers)
    folder = save(tmp_path / "head", name, head=original, params=heads.drawn(original))
    head, loaded = load(folder, "eagle")
    tokens, target = [5, 60, 3, 3, 17, 42], Transformer(TARGET)
    features = jax.random.normal(jax.random.key(3), (1, len(tokens), 32))
    rows = causal_rows(jnp.array([tokens]), jnp.zeros((1,), jnp.int32))
    inputs = rows, features, KVCache.create(head.config.layers, 1, len(tokens))
    run = jax.jit(
        lambda params: head.run(HeadWeights(params, target, heads.TARGET_PARAMS), *inputs)
    )
    actual, _ = run(loaded)
    weights = {name: tensor.astype(np.float64) for name, tensor in heads.stored(folder).items()}
    x = np.concatenate([weights["embed_tokens.weight"][tokens], features[0]], -1)
    x = x @ weights["fc.weight"].T + weights.get("fc.bias", 0)
    for number in range(num_layers):
        layer, visible = loaded[f"layers_{number}"], np.tri(len(tokens), dtype=bool)
        expected = x = heads.literal_layer(head.config.layers, layer, x, visible)
    np.testing.assert_allclose(actual[0], expected, rtol=1e-5, atol=1e-5)


# ---- Medusa and Hydra --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, tied",
    [
        *(("medusa", False), ("hydra", False)),
        *(("hydra, no LM heads", True), ("hydra, prefix, no LM heads", False)),
    ],
)
def test_the_authors_read_lm_heads_from_a_file_of_torch(tmp_path, name, tied):
    """If heads of Hydra have none, these are copies of the target's, with zeros for biases."""
    torch = pytest.importorskip("torch")
    kind, given = name.split(",")[0], {}
    if tied:
        given = TIED | {"head": heads.with_layers(name, tie_word_embeddings=True)}
    folder = save(tmp_path / "head", name, kind, target_name="lmsys/vicuna-7b-v1.3", **given)
    assert config_of(folder)["base_model_name_or_path"] == "lmsys/vicuna-7b-v1.3"
    assert {path.name for path in folder.iterdir()} == {"config.json", f"{kind}_lm_head.pt"}
    expected = published(name)
    if "no LM heads" in name:
        place = "hydra_lm_head.{}.1." if "prefix" in name else "hydra_lm_head.{}."
        table = heads.TARGET_PARAMS["embed_tokens" if tied else "lm_head"]["weight"]
        copies = {"weight": np.asarray(table), "bias": np.zeros(61, np.float32)}
        expected |= {place.format(n) + part: copies[part] for n in range(4) for part in copies}
    tensors = torch.load(folder / f"{kind}_lm_head.pt", weights_only=True)
    assert_same({name: each.numpy() for name, each in tensors.items()}, expected)
    assert load(folder, kind, given.get("target", TARGET))[0].config.has_lm_heads


def test_the_authors_of_medusa_read_heads_without_lm_heads_from_safetensors(tmp_path):
    folder = save(tmp_path / "head", "medusa, no LM heads", "medusa")
    assert (folder / "medusa_lm_head.safetensors").exists()


@pytest.mark.parametrize("has_lm_heads, tied", [(True, False), (False, False), (False, True)])
def test_vllm_finds_its_names_and_an_lm_head(tmp_path, has_lm_heads, tied):
    """Heads without one share the target's, of which there is one copy."""
    name = "medusa" if has_lm_heads else "medusa, no LM heads"
    folder = save(tmp_path / "head", name, "vllm", **(TIED if tied else {}))
    expected = heads.vllm_names(published(name))
    if not has_lm_heads:
        table = heads.TARGET_PARAMS["embed_tokens" if tied else "lm_head"]["weight"]
        expected["lm_heads.0.weight"] = np.asarray(table)
    assert_same(heads.stored(folder), expected)
    assert config_of(folder) == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": 4,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "vocab_size": 61,
        "truncated_vocab_size": 61,
        "medusa_fc_bias": True,
        "original_lm_head": not has_lm_heads,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def test_vllm_leaves_out_what_is_by_default(tmp_path):
    """Biases, sizes of the vocabulary, and LM heads that are all the target's."""
    tensors = {
        f"medusa_heads.{name}": tensor
        for name, tensor in heads.vllm_names(published("medusa, no LM heads")).items()
        if not name.endswith(".bias")
    }
    tensors["medusa_heads.lm_heads.0.weight"] = np.zeros((61, 32), np.float32)
    config = {"model_type": "medusa", "num_heads": 4, "original_lm_head": True}
    folder = heads.write(tmp_path / "head", config, tensors, "model.safetensors")
    module, loaded = load(folder, "medusa")
    assert module.config == HEADS["medusa, no LM heads"].config
    expected = heads.params_of("medusa, no LM heads")
    assert_same(loaded, {name: each | {"bias": jnp.zeros(32)} for name, each in expected.items()})
    edit_config(folder, logit_scale=None, truncated_vocab_size=None)
    assert load(folder, "medusa")[0].config == module.config
    edit_config(folder, medusa_fc_bias=True)
    assert "missing: blocks.0.layers.0.bias, " in heads.failure(folder, "medusa")
