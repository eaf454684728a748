"""Hydra heads from and to files: round trips, the published form, and what is refused."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from specjax.core.errors import SpecjaxError
from specjax.models.heads.files import check_owner, read_about
from specjax.models.heads.hydra import HydraConfig, HydraHeads
from specjax.models.heads.hydra_files import load_hydra, save_hydra
from tests.decoding.hydra_heads import hydra_head
from tests.decoding.tiny import target
from tests.models import checkpoints

TARGET, TARGET_PARAMS = target()[0].config, target()[1]
WEIGHTS, OF_TORCH = "hydra_lm_head.safetensors", "hydra_lm_head.pt"
SIZES = {"hydra_num_heads": 4, "hydra_num_layers": 3}
HUB_CONFIG = SIZES | {  # the keys of published heads
    "hydra_head_arch": "prefix-mlp",
    "grounded_heads": True,
    "hidden_state_offset": 0,
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    "transformers_version": "4.36.2",
}
PLAIN_CONFIG = HUB_CONFIG | {"hydra_head_arch": "mlp"}
ONES = np.ones((32, 32), np.float32)
WIDE = np.ones((32, 64), np.float32)
Tensors = dict[str, Any]


def save(folder: Path, layout: str = "specjax", has_prefix: bool = False, **given: Any) -> Path:
    """Heads of three blocks; `hydra_head` says which."""
    module, params = hydra_head(has_prefix, has_lm_heads=given.pop("has_lm_heads", True))
    given = {"dtype": "float32", "target": TARGET, "target_params": TARGET_PARAMS} | given
    save_hydra(folder, module, params, layout=layout, **given)
    return folder


def write(folder: Path, config: dict[str, Any], tensors: Tensors, file: str = WEIGHTS) -> Path:
    """A folder as others make it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch = pytest.importorskip("torch")
        torch.save({name: torch.from_numpy(t.copy()) for name, t in tensors.items()}, folder / file)
    return folder


def published(has_prefix: bool, has_lm_heads: bool = True) -> Tensors:
    """The tensors of `hydra_head` by the authors' names; in Hydra++ dropout stands between."""
    params = hydra_head(has_prefix, has_lm_heads=has_lm_heads)[1]
    first, *later = (1, 3, 5) if has_prefix else (0, 1, 2)
    lm_head = "hydra_lm_head.{}.1" if has_prefix else "hydra_lm_head.{}"
    named = {}
    for head in range(4):
        named[f"hydra_mlp.{head}.{first}"] = params[f"first_blocks_{head}"]
        for slot in later:
            named[f"hydra_mlp.{head}.{slot}.linear"] = params[f"later_blocks_{head}"]
        if has_lm_heads:
            named[lm_head.format(head)] = params[f"lm_heads_{head}"]
    if has_prefix:
        named["prefix_embeding_layer.layers.0"] = params["layers_0"]
        named["prefix_embeding_layer.norm"] = params["norm"]
    return {name: np.asarray(leaf) for name, leaf in flatten_dict(named, sep=".").items()}


def assert_loads(folder: Path, has_prefix: bool = False, has_lm_heads: bool = True) -> None:
    """That the folder holds `hydra_head`."""
    wanted, params = hydra_head(has_prefix, has_lm_heads=has_lm_heads)
    module, loaded = load_hydra(folder, TARGET, "float32")
    assert module.config == wanted.config
    assert_same(loaded, params)


def assert_same(actual: Any, expected: Any) -> None:
    actual, expected = flatten_dict(actual, sep="."), flatten_dict(expected, sep=".")
    assert actual.keys() == expected.keys()
    for path, leaf in expected.items():
        np.testing.assert_array_equal(actual[path], leaf, err_msg=path)


def failure(folder: Path, wanted: Any = TARGET) -> str:
    """The one-line message of a load that must fail."""
    with pytest.raises(SpecjaxError) as caught:
        load_hydra(folder, wanted, "float32")
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


# ---- Round trips, and what is written ------------------------------------------------------------


@pytest.mark.parametrize("has_lm_heads", [True, False])
@pytest.mark.parametrize("has_prefix", [True, False])
def test_what_is_saved_is_loaded(tmp_path, has_prefix, has_lm_heads):
    about = {"target": "ours", "recipe": [1]}
    given = {"has_prefix": has_prefix, "has_lm_heads": has_lm_heads, "about": about}
    folder = save(tmp_path / "heads", **given)
    assert_loads(folder, has_prefix, has_lm_heads)
    assert read_about(folder) == about
    with pytest.raises(SpecjaxError, match="trained for target ours, but this one is theirs"):
        check_owner(folder, "theirs")


@pytest.mark.parametrize("has_prefix, has_lm_heads", [(True, True), (False, False)])
def test_the_authors_find_their_own_names(tmp_path, has_prefix, has_lm_heads):
    given = {"has_prefix": has_prefix, "has_lm_heads": has_lm_heads, "dtype": "bfloat16"}
    folder = save(tmp_path / "heads", **given)
    tensors, expected = load_file(folder / WEIGHTS), published(has_prefix, has_lm_heads)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor, expected[name].astype(jnp.bfloat16))
    said = {
        "hydra_num_heads": 4,
        "hydra_num_layers": 3,
        "hydra_head_arch": "prefix-mlp" if has_prefix else "mlp",
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "hidden_size": 32,
        "vocab_size": 40,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    said = said if has_lm_heads else said | {"has_lm_heads": False}
    assert json.loads((folder / "config.json").read_text()) == said
    loaded = load_hydra(folder, TARGET, "float32")[1]
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("has_lm_heads", [True, False])
def test_the_authors_read_a_file_of_torch_with_lm_heads(tmp_path, has_lm_heads, tied):
    """Of heads without their own these are copies of the target's, with zeros for biases."""
    torch = pytest.importorskip("torch")
    given: dict[str, Any] = {"has_lm_heads": has_lm_heads}
    table = TARGET_PARAMS["embed_tokens" if tied else "lm_head"]
    if tied:
        given |= {"target": replace(TARGET, tie_word_embeddings=True)}
        given |= {"target_params": {"embed_tokens": table}}
    folder = save(tmp_path / "heads", "hydra", **given)
    assert {path.name for path in folder.iterdir()} == {"config.json", OF_TORCH}
    tensors = torch.load(folder / OF_TORCH, weights_only=True)
    expected = published(False, has_lm_heads)
    if not has_lm_heads:
        copies = {"weight": table["weight"], "bias": np.zeros(40, np.float32)}
        expected |= {f"hydra_lm_head.{n}.{part}": copies[part] for n in range(4) for part in copies}
    assert_same({name: each.numpy() for name, each in tensors.items()}, expected)
    assert "has_lm_heads" not in json.loads((folder / "config.json").read_text())
    module, loaded = load_hydra(folder, TARGET, "float32")
    assert module.config.has_lm_heads
    np.testing.assert_array_equal(loaded["lm_heads_3"]["bias"], expected["hydra_lm_head.3.bias"])


# ---- What others have published ------------------------------------------------------------------


@pytest.mark.parametrize("has_prefix", [True, False])
@pytest.mark.parametrize("file", [WEIGHTS, OF_TORCH])
def test_heads_are_read_as_published(tmp_path, file, has_prefix):
    """What the prefix layer carries along unused is no part of them."""
    tensors = published(has_prefix)
    if has_prefix:
        tensors["prefix_embeding_layer.embed_tokens.weight"] = np.ones((40, 32), np.float32)
        buffer = "prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"
        tensors[buffer] = np.ones(4, np.float32)
    config = HUB_CONFIG if has_prefix else PLAIN_CONFIG
    assert_loads(write(tmp_path / "heads", config, tensors, file), has_prefix)


@pytest.mark.parametrize("has_prefix", [True, False])
def test_where_the_config_is_silent_the_tensors_decide(tmp_path, has_prefix):
    silent = {"hydra_num_heads": None, "grounded_heads": None, "hidden_state_offset": None}
    assert_loads(write(tmp_path / "heads", silent, published(has_prefix)), has_prefix)


@pytest.mark.parametrize("said", [{}, {"has_lm_heads": None}])
def test_where_the_config_says_nothing_of_lm_heads_the_tensors_decide(tmp_path, said):
    tensors = published(False, has_lm_heads=False)
    assert_loads(write(tmp_path / "heads", PLAIN_CONFIG | said, tensors), has_lm_heads=False)


# ---- What is not loaded --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"medusa_num_heads": 4}, "describes a Medusa head; give a Hydra head"),
        ({"draft_vocab_size": 32}, "describes an EAGLE-3 head, which has another architecture"),
        ({"grounded_heads": False}, "grounded_heads False is not supported: heads that do not see"),
        ({"hidden_state_offset": 2}, "hidden_state_offset 2 is not supported: only the target's"),
        ({"hydra_head_arch": "cross-attn"}, "hydra_head_arch 'cross-attn' is not supported; give"),
        ({"hydra_head_arch": ["mlp"]}, "hydra_head_arch ['mlp'] is not supported; give heads of m"),
        ({"hydra_num_heads": 0}, "hydra_num_heads 0 is not a whole number from 1 on; check the"),
        ({"hydra_num_layers": "4"}, "hydra_num_layers '4' is not a whole number from 1 on; check"),
        ({"has_lm_heads": "no"}, "has_lm_heads 'no' is not true or false; check the config"),
        ({"hidden_size": 64}, "for a target of hidden size 64, but this one has 32; give a head"),
        ({"vocab_size": 41}, "for a target of vocabulary 41, but this one has 40; give a head"),
    ],
)
def test_configs_that_are_refused(tmp_path, changes, told):
    folder = save(tmp_path / "heads")
    checkpoints.edit_config(folder, **changes)
    message = failure(folder)
    assert message.startswith(f"{folder / 'config.json'}") and told in message


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"hydra_num_heads": 5}, "missing: hydra_mlp.4.0.linear.weight, "),
        ({"hydra_num_layers": 2}, "unexpected: hydra_mlp.0.2.linear."),
        ({"has_lm_heads": False}, "unexpected: hydra_lm_head.0."),
        ({"hydra_head_arch": "prefix-mlp"}, "missing: prefix_embeding_layer.layers.0.input_layer"),
    ],
)
def test_configs_that_the_weights_contradict_are_refused(tmp_path, changes, told):
    folder = save(tmp_path / "heads")
    checkpoints.edit_config(folder, **changes)
    message = failure(folder)
    assert message.startswith(f"{folder}: the weights do not fit config.json; ") and told in message


BLOCKS = {
    name: ... for name in published(False) if name.startswith(("hydra_mlp.", "hydra_lm_head."))
}
CONNECTIONS = {name: ... for name in BLOCKS if ".res_connection." in name}


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"hydra_mlp.1.2.linear.weight": ONES}, "hydra_mlp.1.2.linear.weight is not equal to hydr"),
        ({"hydra_mlp.0.1.linear.bias": ...}, "missing: hydra_mlp.0.1.linear.bias; check that both"),
        ({"hydra_mlp.0.0.res_connection.bias": ...}, "missing: hydra_mlp.0.0.res_connection.bias;"),
        ({"hydra_lm_head.2.bias": ...}, "missing: hydra_lm_head.2.bias;"),
        ({"norm.weight": ONES[0]}, "unexpected: norm.weight;"),
        (
            {"hydra_mlp.1.0.linear.weight": WIDE},
            "wrong shape: hydra_mlp.1.0.linear.weight is (32, 64), expected (32, 96);",
        ),
        ({"hydra_mlp.0.0.linear.weight": WIDE[1:]}, "for a target of hidden size 31, but this one"),
        ({"hydra_lm_head.0.weight": np.ones((41, 32))}, "for a target of vocabulary 41, but this"),
        ({"hydra_mlp.0.0.linear.weight": WIDE.astype(np.int8)}, "quantised weights are not suppor"),
        (CONNECTIONS, "these heads do not see the drafted tokens (there is no res_connection, as"),
        ({"midlayer.mlp.up_proj.weight": ONES}, "holds an EAGLE-3 head"),
        (BLOCKS | {"x": ONES}, "holds no Hydra head: there is no tensor such as hydra_mlp.0.0.lin"),
        (BLOCKS | {"fc.weight": WIDE}, "holds an EAGLE, EAGLE-2 or HASS head; give a Hydra head"),
        (BLOCKS | {"0.0.linear.weight": ONES}, "holds a Medusa head; give a Hydra head"),
    ],
)
def test_weights_that_are_refused(tmp_path, changes, told):
    tensors = {name: t for name, t in (published(False) | changes).items() if t is not ...}
    message = failure(write(tmp_path / "heads", PLAIN_CONFIG, tensors))
    assert message.startswith(str(tmp_path / "heads")) and told in message


@pytest.mark.parametrize(
    "name, content, told",
    [
        ("config.json", None, "holds no config.json; give the folder of a Hydra head"),
        ("config.json", b"{", "config.json is not valid JSON"),
        (WEIGHTS, None, "holds no weights (hydra_lm_head.safetensors or hydra_lm_head.pt or"),
        (WEIGHTS, b"cut", "is damaged or cut short"),
    ],
)
def test_missing_and_damaged_files_are_named(tmp_path, name, content, told):
    folder = save(tmp_path / "heads")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    assert told in failure(folder)


def test_a_damaged_file_of_torch_is_named(tmp_path):
    pytest.importorskip("torch")
    folder = save(tmp_path / "heads")
    (folder / WEIGHTS).rename(folder / OF_TORCH)
    assert "hydra_lm_head.pt is damaged or holds no weights; download it" in failure(folder)


# ---- What is not saved ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, told",
    [
        ({"layout": "vllm"}, "layout 'vllm' is unknown; choose specjax, hydra"),
        ({"target": replace(TARGET, vocab_size=41)}, "for a target of vocabulary 40, but this one"),
        (
            {"has_prefix": True, "target": replace(TARGET, rms_norm_eps=1e-3)},
            "the prefix layer is not shaped like one of the target's",
        ),
        ({"layout": "hydra", "target_params": None}, "which the authors' code reads from their"),
        (
            {"layout": "hydra", "target_params": {"lm_head": {"weight": jnp.ones((32, 32))}}},
            "wrong shape: lm_head is (32, 32), expected (40, 32); give the target of these heads",
        ),
    ],
)
def test_what_does_not_belong_together_is_not_saved(tmp_path, given, told):
    with pytest.raises(SpecjaxError, match=re.escape(told)):
        save(tmp_path / "heads", has_lm_heads=False, **given)
    assert not list(tmp_path.iterdir())


def test_params_of_other_heads_are_not_saved(tmp_path):
    fewer = HydraHeads(HydraConfig.for_target(TARGET, num_heads=1, num_layers=3))
    with pytest.raises(SpecjaxError, match=r"unexpected: first_blocks_1\.linear\..*give the heads"):
        save_hydra(tmp_path / "heads", fewer, hydra_head()[1], "float32", target=TARGET)
    assert not list(tmp_path.iterdir())


def test_without_torch_its_file_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SpecjaxError, match=r"hydra_lm_head\.pt needs torch to be written; run"):
        save(tmp_path / "heads", "hydra")
    assert not list(tmp_path.iterdir())


def test_a_failed_save_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("specjax.models.io.huggingface.save_file", fail)
    with pytest.raises(SpecjaxError, match="No space left on device"):
        save(tmp_path / "heads")
    assert not list(tmp_path.iterdir())
