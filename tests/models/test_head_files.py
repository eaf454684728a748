"""Heads of every kind from and to files: round trips, published forms, and rejected files."""

import re
import sys
from dataclasses import replace
from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from specjax.core.errors import SpecjaxError
from specjax.models.config import Rope
from specjax.models.io.head_files import check_owner, detect_format, read_about
from tests.models import heads
from tests.models.checkpoints import edit_config
from tests.models.heads import HEADS, TARGET, assert_same, failure, format_of, load, published, save

ONE_OF_EACH = ("eagle", "medusa", "hydra", "parallel")
EVERYWHERE = {(name, layout) for name in HEADS for layout in format_of(name).layouts}
LESS = {("eagle, draft vocabulary", reader) for reader in ("vllm", "sglang")}  # without it
REFUSED = {("eagle, fc bias", "vllm")}  # see test_head_layouts.py
NORM, SQUARE = np.ones(32, np.float32), np.ones((32, 32), np.float32)
LAYER = {  # of the authors' configs
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "vocab_size": 61,
}
SIZES = {"hidden_size": 32, "vocab_size": 61}
NUM_HYDRA = {"hydra_num_heads": 4, "hydra_num_layers": 3}
PUBLISHED = {  # configs, and no more than they hold
    "eagle": LAYER,
    "eagle, fc bias": LAYER,  # of which it says nothing
    "medusa": {"medusa_num_heads": 2, "medusa_num_layers": 1},  # wrong, as on the hub
    "medusa, no LM heads": {"medusa_num_heads": 2, "medusa_num_layers": 1, "version": "2"},
    "hydra": NUM_HYDRA | {"hydra_head_arch": "mlp", "grounded_heads": True},
    "hydra, no LM heads": {"hydra_num_heads": None, "grounded_heads": None},  # says nothing
    "hydra, prefix, no LM heads": {"hydra_num_layers": None, "has_lm_heads": None},
    "hydra, prefix": NUM_HYDRA | {"hydra_head_arch": "prefix-mlp", "hidden_state_offset": 0},
}
UNUSED = {  # tensors that come along
    "eagle": {
        "embed_tokens.weight": np.ones((61, 32), np.float32),
        "lm_head.weight": np.ones((61, 32), np.float32),
        "layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
    },
    "hydra, prefix": {
        "prefix_embeding_layer.embed_tokens.weight": np.ones((61, 32), np.float32),
        "prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
    },
}
GROUNDED = NUM_HYDRA | {"grounded_heads": True, "hidden_state_offset": 0} | SIZES
MASKS = {"architectures": ["ParallelSpecHead"], "num_masks": 3}
WRITTEN = {  # configs in the first layout
    "eagle": LAYER | {"bias": False, "qkv_bias": False},
    "eagle, fc bias": LAYER | {"bias": True},
    "medusa": {"medusa_num_heads": 4, "medusa_num_layers": 2, "version": "1"} | SIZES,
    "medusa, no LM heads": {"medusa_num_heads": 4, "medusa_num_layers": 2, "version": "2"} | SIZES,
    "hydra": GROUNDED | {"hydra_head_arch": "mlp", "has_lm_heads": True},
    "hydra, no LM heads": GROUNDED | {"hydra_head_arch": "mlp", "has_lm_heads": False},
    "hydra, prefix": GROUNDED | {"hydra_head_arch": "prefix-mlp", "has_lm_heads": True},
    "parallel": LAYER | MASKS | {"reads_features": True, "bias": True},
    "parallel, tokens": LAYER | MASKS | {"reads_features": False},
}


# ---- Round trips, and what is written ----------------------------------------------------------


@pytest.mark.parametrize("name, layout", sorted(EVERYWHERE - REFUSED - LESS))
def test_what_is_saved_is_loaded(tmp_path, name, layout):
    if format_of(name).layouts[layout].file.endswith(".pt"):
        pytest.importorskip("torch")
    about = {"target": "ours", "recipe": {"steps": [1, 2]}}
    folder = save(tmp_path / "head", name, layout, about=about)
    gains = {("eagle", "sglang"): "eagle, fc bias"}  # which is zero
    gains |= {(each, "hydra"): each.replace(", no LM heads", "") for each in HEADS}
    if (same := gains.get((name, layout), name)) == name:
        heads.assert_loads(folder, name)
    else:
        assert load(folder, name)[0].config == HEADS[same].config
    assert detect_format(folder, heads.FORMATS) is format_of(name)
    assert read_about(folder) == about
    check_owner(folder, "ours")
    with pytest.raises(SpecjaxError, match="trained for target ours, but this one is theirs; give"):
        check_owner(folder, "theirs")


WITH_TIED = ("eagle", "eagle3", "medusa, no LM heads", "hydra, prefix, no LM heads", "parallel")


@pytest.mark.parametrize(
    "name, layout", [each for each in sorted(EVERYWHERE - REFUSED) if each[0] in WITH_TIED]
)
def test_a_head_of_a_tied_target_is_loaded(tmp_path, name, layout):
    if format_of(name).layouts[layout].file.endswith(".pt"):
        pytest.importorskip("torch")
    head = HEADS[name]
    if hasattr(head.config, "layers"):
        head = heads.with_layers(name, tie_word_embeddings=True)
    folder = save(tmp_path / "head", name, layout, head=head, **heads.TIED)
    _, params = load(folder, format_of(name).kind, heads.TIED["target"])
    expected, leaves = flatten_dict(heads.params_of(name)), flatten_dict(params)
    assert leaves.keys() >= expected.keys()
    for path in leaves.keys() & expected.keys():
        np.testing.assert_array_equal(leaves[path], expected[path])


@pytest.mark.parametrize("name", WRITTEN)
def test_the_authors_find_their_own_names_and_keys(tmp_path, name):
    folder = save(tmp_path / "head", name, dtype="bfloat16", target_params=None)
    expected = {path: each.astype(jnp.bfloat16) for path, each in published(name).items()}
    assert_same(heads.stored(folder), expected)
    config = heads.config_of(folder)
    assert config.pop("torch_dtype") == config.pop("dtype") == "bfloat16"
    if name.startswith(("eagle", "parallel")):  # whose layers are described in full
        config = {key: config[key] for key in WRITTEN[name]}
    assert config == WRITTEN[name]
    assert read_about(folder) == {}
    check_owner(folder, "any")  # which it does not say
    rounded = {path: each.astype(np.float32) for path, each in expected.items()}
    wide = heads.write(tmp_path / "wide", heads.config_of(folder), rounded, "model.safetensors")
    assert_same(load(folder, name)[1], load(wide, name)[1])  # params are float32 in both


DYNAMIC = {"rope": Rope("dynamic", rope_theta=5e3, factor=2.0), "max_position_embeddings": 32}
LLAMA3 = {"rope": Rope("llama3", 5e5, 8.0, 1.0, 4.0, 32), "num_hidden_layers": 2}


@pytest.mark.parametrize(
    "name, layout, changes",
    [
        ("eagle", "eagle", DYNAMIC),
        ("eagle", "vllm", LLAMA3),
        ("eagle, fc bias", "sglang", DYNAMIC),
        ("parallel", "specjax", LLAMA3),
    ],
)
def test_no_setting_of_layers_is_lost(tmp_path, name, layout, changes):
    head = heads.with_layers(name, attention_bias=True, mlp_bias=True, **changes)
    params = heads.drawn(head)
    folder = save(tmp_path / "head", name, layout, head=head, params=params)
    again, loaded = load(folder, name)
    assert again.config == head.config
    assert_same(loaded, params)
    if layout == "eagle":  # whose authors read two fields
        assert heads.config_of(folder)["rope_scaling"] == {"type": "dynamic", "factor": 2.0}
        assert heads.config_of(folder)["rope_parameters"]["rope_type"] == "dynamic"


@pytest.mark.parametrize("name", ["eagle", "parallel"])
def test_a_head_of_mistral_looks_at_all_of_the_text(tmp_path, name):
    target = replace(TARGET, model_type="mistral", sliding_window=8)
    config = HEADS[name].config
    layers = type(config).for_target(target).layers
    head = type(HEADS[name])(replace(config, layers=layers))
    folder = save(tmp_path / "head", name, head=head, target=target, target_params=None)
    assert load(folder, name, target)[0].config.layers == replace(layers, model_type="llama")
    edit_config(folder, model_type="mistral", sliding_window=8)
    assert load(folder, name, target)[0].config.layers == layers


# ---- What others have published ----------------------------------------------------------------


@pytest.mark.parametrize(
    "name, file",
    [
        *((name, (*format_of(name).files, "model.safetensors")[0]) for name in PUBLISHED),
        *product(("medusa", "hydra, prefix"), ("model.safetensors", "pytorch_model.bin")),
        ("eagle", "pytorch_model.bin"),
    ],
)
def test_heads_are_read_as_published(tmp_path, name, file):
    tensors = published(name) | UNUSED.get(name, {})
    heads.assert_loads(heads.write(tmp_path / "head", PUBLISHED[name], tensors, file), name)


def test_of_a_whole_model_only_the_heads_are_read(tmp_path):
    tensors = {f"medusa_head.{name}": tensor for name, tensor in published("medusa").items()}
    tensors |= {"model.norm.weight": NORM, "lm_head.weight": SQUARE, "0.0.linear.weight": SQUARE}
    config = PUBLISHED["medusa"] | {"model_type": "mistral"} | SIZES
    folder = heads.write(tmp_path / "head", config, tensors, "model.safetensors")
    heads.assert_loads(folder, "medusa")
    edit_config(folder, medusa_num_heads=..., medusa_num_layers=...)
    assert "holds a Medusa head; give a Hydra head" in failure(folder, "hydra")


def test_the_tapped_layers_of_an_eagle3_head_are_numbered_as_each_reader_does(tmp_path):
    taps, key = HEADS["eagle3"].config.taps, "eagle_aux_hidden_state_layer_ids"
    folder = save(tmp_path / "head", "eagle3")
    nested = {key: [layer + 1 for layer in taps]}
    edit_config(folder, eagle_config=nested)
    other = load(folder, "eagle3")[0]
    assert other.config.taps == tuple(layer + 2 for layer in taps)
    folder = save(tmp_path / "other", "eagle3", head=other)
    assert heads.config_of(folder)["eagle_config"] == nested
    assert load(folder, "eagle3")[0].config == other.config


# ---- What is not loaded ------------------------------------------------------------------------

REFUSED_CONFIGS = [
    ("eagle", {"speculators_model_type": "eagle3"}, "a head in the format of speculators, which"),
    ("eagle", {"hidden_size": 64}, "a target of hidden_size 64, but this one has 32; give a head "),
    ("eagle", {"vocab_size": 60}, "a target of vocab_size 60, but this one has 61; give a head "),
    ("eagle", {"draft_vocab_size": 32}, "describes an EAGLE-3 head; give an EAGLE, EAGLE-2 or HA"),
    ("eagle", {"architectures": ["LlamaForCausalLMEagle3"]}, "describes an EAGLE-3 head"),
    ("eagle3", {"norm_before_residual": True}, "norm_before_residual is not supported"),
    ("eagle3", {"num_hidden_layers": 2}, "an EAGLE-3 head of 2 layers is not supported"),
    ("eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 1]}, "cannot read the target's layers (1"),
    ("eagle3", {"eagle_aux_hidden_state_layer_ids": 5}, "`taps` must be"),
    ("eagle3", {"eagle_aux_hidden_state_layer_ids": [[1], [2, 3]]}, "`taps` must be"),
    ("eagle3", {"eagle_config": "x"}, "eagle_config 'x' is not an object"),
    ("eagle", {"model_type": "falcon"}, ": model_type 'falcon' is not supported"),
    ("eagle", {"model_type": "gemma2"}, ": layers of gemma2 with hidden_act"),
    ("eagle", {"vocab_size": ...}, ": there is no 'vocab_size'"),
    ("eagle", {"bias": True}, ": bias is True, but False according to the weights; correct it"),
    ("eagle", {"qkv_bias": "yes"}, ": `attention_bias` must be true or false, got 'yes'"),
    ("medusa", {"version": "2"}, ": version is '2', but '1' according to the weights; correct it"),
    ("medusa", {"logit_scale": 0.5}, "logit_scale is 0.5, but 1 according to the weights"),
    ("medusa", {"truncated_vocab_size": 20}, "a target of truncated_vocab_size 20, but this one"),
    ("hydra", {"grounded_heads": False}, "grounded_heads is False, but True according to"),
    ("parallel", {"num_masks": 0}, ": num_masks is 0, but 3 according to the weights; correct it"),
]


@pytest.mark.parametrize("name, changes, complaint", REFUSED_CONFIGS)
def test_configs_that_are_refused(tmp_path, name, changes, complaint):
    folder = save(tmp_path / "head", name)
    edit_config(folder, **changes)
    message = failure(folder, name)
    assert message.startswith(str(folder / "config.json"))
    assert complaint in message


NO_FC = {"fc.weight": ...}
NO_BLOCKS = {name: ... for name in published("medusa") if ".linear." in name}
NOT_GROUNDED = {name: ... for name in published("hydra") if ".res_connection." in name}
NO_LM_HEADS = {f"{number}.2.weight": ... for number in range(1, 4)}
INT8 = "quantised weights are not supported: "
REFUSED_TENSORS = [
    ("eagle", {"layers.0.hidden_norm.weight": NORM}, "holds an EAGLE-3 head; give an EAGLE, EAGLE"),
    ("eagle", {"d2t": np.zeros(9, np.int64)}, "holds an EAGLE-3 head"),
    ("eagle", NO_FC | {"model.norm.weight": NORM}, "holds a whole model; give an EAGLE, EAGLE-2"),
    ("eagle, fc bias", NO_FC, "missing: fc.weight; check that both belong together"),
    ("eagle", NO_FC, "holds tensors of no known kind (layers.0.mlp.down_proj.weight, layers"),
    ("eagle", {"layers.0.input_layernorm.weight": NORM}, "unexpected: layers.0.input_layernorm.we"),
    ("eagle", {"fc.weight": np.ones((32, 96), "f4")}, "fc.weight is (32, 96), expected (3"),
    ("eagle", {"fc.weight": np.ones((32, 64), "i1")}, f"{INT8}fc.weight (I8); use a checkpoint"),
    ("medusa", {"0.1.linear.weight": SQUARE}, "0.1.linear.weight is not equal to 0.0.linear.weigh"),
    ("medusa", NO_LM_HEADS, "missing: 1.2.weight, 2.2.weight, 3.2.weight;"),
    ("medusa", {"0.0.linear.bias": SQUARE}, "wrong shape: 0.0.linear.bias is (32, 32), expected"),
    ("medusa", NO_BLOCKS, "holds tensors of no known kind (0.2.weight, 1.2.weight, 2.2.weight); g"),
    ("hydra", {"hydra_mlp.1.2.linear.weight": SQUARE}, "hydra_mlp.1.2.linear.weight is not equal"),
    ("hydra", NOT_GROUNDED, "missing: hydra_mlp.0.0.res_connection.bias, "),
    ("parallel", {"mask_hidden": ...}, "missing: mask_hidden; check that both belong together"),
    ("parallel", {"mask_embeddings.weight": ...}, "holds an EAGLE, EAGLE-2 or HASS head; give a P"),
    ("parallel, tokens", {"mask_embeddings.weight": ...}, "holds a whole model; give a ParallelSp"),
]


@pytest.mark.parametrize("name, changes, complaint", REFUSED_TENSORS)
def test_weights_that_are_refused(tmp_path, name, changes, complaint):
    folder = save(tmp_path / "head", name, target_params=None)
    heads.rewrite(folder, **changes)
    assert complaint in failure(folder, name)


@pytest.mark.parametrize(
    "kind, size, theirs", [("medusa", "hidden_size", 32), ("hydra", "vocab_size", 61)]
)
def test_a_head_of_another_target_is_recognised_by_its_tensors(tmp_path, kind, size, theirs):
    folder = save(tmp_path / "head", kind)
    edit_config(folder, hidden_size=..., vocab_size=...)
    message = failure(folder, kind, replace(TARGET, **{size: 2 * theirs}))
    assert f"for a target of {size} {theirs}, but this one has {2 * theirs}; give a" in message


@pytest.mark.parametrize("offered", ONE_OF_EACH)
@pytest.mark.parametrize("wanted", ONE_OF_EACH)
def test_no_kind_is_taken_for_another(tmp_path, offered, wanted):
    """By the config, and where that says nothing, by the names of the tensors."""
    folder = save(tmp_path / "head", offered)
    if offered == wanted:
        return heads.assert_loads(folder, wanted)
    title, wish = (format_of(name).signature.title for name in (offered, wanted))
    message = failure(folder, wanted)
    assert f"{title}; give {wish}" in message
    if offered != "eagle":  # whose configs say nothing
        with pytest.raises(SpecjaxError, match=re.escape(message)):
            detect_format(folder, heads.FORMATS, format_of(wanted))


@pytest.mark.parametrize(
    "name, content, complaint",
    [
        ("config.json", None, "holds no config.json; give the folder of a"),
        ("config.json", b"{", "config.json is not valid JSON"),
        ("*.safetensors", None, "holds no weights (medusa_lm_head.safetensors or medusa_lm_"),
        ("*.safetensors", b"cut", "is damaged or cut short"),
        ("*.safetensors", "medusa_lm_head.pt", "medusa_lm_head.pt is damaged or holds no weights"),
    ],
)
def test_missing_and_damaged_files_are_named(tmp_path, name, content, complaint):
    folder = save(tmp_path / "head", "medusa")
    (path,) = folder.glob(name)
    if isinstance(content, str):
        pytest.importorskip("torch")
        path.rename(path.with_name(content))
    else:
        path.unlink()
    if isinstance(content, bytes):
        path.write_bytes(content)
    assert complaint in failure(folder, "medusa")


# ---- What is not saved -------------------------------------------------------------------------

OTHER_NORM = replace(TARGET, rms_norm_eps=1e-3)
NOT_SAVED = [
    ("eagle", {"head": HEADS["eagle, fc bias"]}, "missing: fc.bias; give the head of these params"),
    ("hydra, prefix", {"target": OTHER_NORM}, "does not have the shape with which it would be"),
    ("medusa, no LM heads", {"layout": "vllm", "target_params": None}, "and vLLM reads one from"),
    ("hydra, no LM heads", {"layout": "hydra", "target_params": None}, "the authors' code reads"),
]


@pytest.mark.parametrize("name, given, complaint", NOT_SAVED)
def test_what_does_not_belong_together_is_not_saved(tmp_path, name, given, complaint):
    with pytest.raises(SpecjaxError, match=re.escape(complaint)):
        save(tmp_path / "head", name, **given)
    assert not list(tmp_path.iterdir())


def test_without_torch_its_file_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SpecjaxError, match=r"medusa_lm_head\.pt needs torch to be written; run"):
        save(tmp_path / "head", "medusa", "medusa")
    assert not list(tmp_path.iterdir())
