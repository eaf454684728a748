"""Medusa heads from and to files: round trips, the published forms, and what is refused."""

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
from specjax.models.heads.medusa import MedusaConfig, MedusaHeads
from specjax.models.heads.medusa_files import load_medusa, save_medusa
from tests.decoding.medusa_heads import medusa_head
from tests.decoding.tiny import target
from tests.models import checkpoints

TARGET, TARGET_PARAMS = target()[0].config, target()[1]
WEIGHTS = "medusa_lm_head.safetensors"
HUB_CONFIG = {  # of published heads: nothing else, and the number of heads is wrong
    "medusa_num_heads": 2,
    "medusa_num_layers": 1,
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    "transformers_version": "4.31.0",
}
ONES = np.ones((32, 32), np.float32)
Tensors = dict[str, np.ndarray]


def save(folder: Path, layout: str = "specjax", has_lm_heads: bool = True, **given: Any) -> Path:
    """Heads with two layers; `medusa_head` says which."""
    module, params = medusa_head(has_lm_heads=has_lm_heads)
    given = {"dtype": "float32", "target": TARGET, "target_params": TARGET_PARAMS} | given
    save_medusa(folder, module, params, layout=layout, **given)
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


def published(has_lm_heads: bool = True) -> Tensors:
    """The tensors of `medusa_head` by the authors' names."""
    tensors = {}
    for number in range(4):
        params = medusa_head(has_lm_heads=has_lm_heads)[1]
        for layer in range(2):
            for part, leaf in params[f"blocks_{number}"].items():
                tensors[f"{number}.{layer}.linear.{part}"] = np.asarray(leaf)
        if has_lm_heads:
            tensors[f"{number}.2.weight"] = np.asarray(params[f"lm_heads_{number}"]["weight"])
    return tensors


def of_vllm(tensors: Tensors) -> Tensors:
    """The same tensors by vLLM's names."""
    renamed = {}
    for name, tensor in tensors.items():
        name = re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name)
        renamed[re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", name)] = tensor
    return renamed


def assert_loads(folder: Path, has_lm_heads: bool = True) -> None:
    """That the folder holds `medusa_head`."""
    wanted, params = medusa_head(has_lm_heads=has_lm_heads)
    module, loaded = load_medusa(folder, TARGET, "float32")
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
        load_medusa(folder, wanted, "float32")
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


# ---- Round trips, and what is written ------------------------------------------------------------


@pytest.mark.parametrize("has_lm_heads", [True, False])
@pytest.mark.parametrize("layout", ["specjax", "medusa", "vllm"])
def test_what_is_saved_is_loaded(tmp_path, layout, has_lm_heads):
    if layout == "medusa" and has_lm_heads:
        pytest.importorskip("torch")
    about = {"target": "ours", "recipe": [1]}
    folder = save(tmp_path / "heads", layout, has_lm_heads, about=about)
    assert_loads(folder, has_lm_heads)
    assert read_about(folder) == about
    with pytest.raises(SpecjaxError, match="trained for target ours, but this one is theirs"):
        check_owner(folder, "theirs")


@pytest.mark.parametrize("has_lm_heads", [True, False])
def test_the_authors_find_their_own_names(tmp_path, has_lm_heads):
    folder = save(tmp_path / "heads", has_lm_heads=has_lm_heads, dtype="bfloat16")
    tensors, expected = load_file(folder / WEIGHTS), published(has_lm_heads)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor, expected[name].astype(jnp.bfloat16))
    assert json.loads((folder / "config.json").read_text()) == {
        "medusa_num_heads": 4,
        "medusa_num_layers": 2,
        "hidden_size": 32,
        "vocab_size": 40,
        "version": "1" if has_lm_heads else "2",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    loaded = load_medusa(folder, TARGET, "float32")[1]
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {jnp.dtype("float32")}


def test_the_authors_read_lm_heads_from_a_file_of_torch_only(tmp_path):
    torch = pytest.importorskip("torch")
    folder = save(tmp_path / "heads", "medusa")
    assert {path.name for path in folder.iterdir()} == {"config.json", "medusa_lm_head.pt"}
    tensors = torch.load(folder / "medusa_lm_head.pt", weights_only=True)
    assert_same({name: each.numpy() for name, each in tensors.items()}, published())
    folder = save(tmp_path / "version 2", "medusa", has_lm_heads=False)
    assert {path.name for path in folder.iterdir()} == {"config.json", WEIGHTS}


@pytest.mark.parametrize("has_lm_heads", [True, False])
def test_vllm_finds_its_names_and_an_lm_head(tmp_path, has_lm_heads):
    """Heads without one share the target's, of which there is one copy."""
    folder = save(tmp_path / "heads", "vllm", has_lm_heads)
    expected = of_vllm(published(has_lm_heads))
    if not has_lm_heads:
        expected["lm_heads.0.weight"] = np.asarray(TARGET_PARAMS["lm_head"]["weight"])
    assert_same(load_file(folder / "model.safetensors"), expected)
    assert json.loads((folder / "config.json").read_text()) == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": 4,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "vocab_size": 40,
        "truncated_vocab_size": 40,
        "medusa_fc_bias": True,
        "original_lm_head": not has_lm_heads,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def test_a_tied_target_lends_its_embedding_to_vllm(tmp_path):
    tied = replace(TARGET, tie_word_embeddings=True)
    given = {"target": tied, "target_params": {"embed_tokens": {"weight": jnp.ones((40, 32))}}}
    folder = save(tmp_path / "heads", "vllm", has_lm_heads=False, **given)
    assert (load_file(folder / "model.safetensors")["lm_heads.0.weight"] == 1).all()


# ---- What others have published ------------------------------------------------------------------


@pytest.mark.parametrize("has_lm_heads", [True, False])
@pytest.mark.parametrize("file", [WEIGHTS, "medusa_lm_head.pt", "pytorch_model.bin"])
def test_heads_are_read_as_published(tmp_path, file, has_lm_heads):
    """Their number is that of the tensors, whatever the config says."""
    folder = write(tmp_path / "heads", HUB_CONFIG, published(has_lm_heads), file)
    assert_loads(folder, has_lm_heads)
    if not has_lm_heads:
        checkpoints.edit_config(folder, version="2")
        assert_loads(folder, has_lm_heads)


def test_of_a_whole_model_only_the_heads_are_read(tmp_path):
    tensors = {f"medusa_head.{name}": tensor for name, tensor in published().items()}
    tensors |= {"model.norm.weight": ONES[0], "lm_head.weight": ONES, "0.0.linear.weight": ONES}
    config = HUB_CONFIG | {"model_type": "mistral", "hidden_size": 32, "vocab_size": 40}
    assert_loads(write(tmp_path / "heads", config, tensors, "model.safetensors"))


def test_vllm_leaves_out_what_is_by_default(tmp_path):
    """Biases, sizes of the vocabulary, and LM heads that are all the target's."""
    tensors = of_vllm(published(has_lm_heads=False))
    tensors = {name: each for name, each in tensors.items() if not name.endswith(".bias")}
    config = {"model_type": "medusa", "num_heads": 4, "original_lm_head": True}
    named = {f"medusa_heads.{name}": tensor for name, tensor in tensors.items()}
    named["medusa_heads.lm_heads.0.weight"] = np.zeros((40, 32), np.float32)
    folder = write(tmp_path / "heads", config, named, "model.safetensors")
    module, loaded = load_medusa(folder, TARGET, "float32")
    assert module.config == medusa_head(has_lm_heads=False)[0].config
    for number in range(4):
        expected = medusa_head(has_lm_heads=False)[1][f"blocks_{number}"]["weight"]
        np.testing.assert_array_equal(loaded[f"blocks_{number}"]["weight"], expected)
        np.testing.assert_array_equal(loaded[f"blocks_{number}"]["bias"], np.zeros(32))
    checkpoints.edit_config(folder, logit_scale=None, truncated_vocab_size=None)
    assert load_medusa(folder, TARGET, "float32")[0].config == module.config
    checkpoints.edit_config(folder, medusa_fc_bias=True)
    assert "missing: blocks.0.layers.0.bias, " in failure(folder)


# ---- What is not loaded --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"medusa_num_heads": ..., "hydra_num_heads": 4}, "describes a Hydra head; give a Medusa"),
        ({"medusa_num_heads": ..., "num_masks": 4}, "describes a ParallelSpec head; give a Medusa"),
        ({"draft_vocab_size": 32}, "describes an EAGLE-3 head, which has another architecture"),
        ({"hidden_size": 64}, "for a target of hidden size 64, but this one has 32; give a head"),
        ({"vocab_size": 41}, "for a target of vocabulary 41, but this one has 40; give a head"),
        ({"version": "2"}, "version '2' (2 is without LM heads), but the weights hold LM heads; "),
        ({"logit_scale": 0.5}, "logit_scale 0.5 is not supported; scale the LM heads of the file"),
    ],
)
def test_configs_that_are_refused(tmp_path, changes, told):
    folder = save(tmp_path / "heads")
    checkpoints.edit_config(folder, **changes)
    message = failure(folder)
    assert message.startswith(f"{folder / 'config.json'}") and told in message


def test_a_version_with_lm_heads_must_have_them(tmp_path):
    folder = save(tmp_path / "heads", has_lm_heads=False)
    checkpoints.edit_config(folder, version="1")
    assert "version '1' (2 is without LM heads), but the weights hold no LM" in failure(folder)


def test_heads_of_a_part_of_the_vocabulary_are_refused_by_name(tmp_path):
    folder = save(tmp_path / "heads", "vllm")
    checkpoints.edit_config(folder, truncated_vocab_size=20)
    assert "a part of the vocabulary only (truncated_vocab_size 20), which" in failure(folder)
    tensors = of_vllm(published()) | {"token_map": np.arange(20)}
    config = {"model_type": "medusa"}
    folder = write(tmp_path / "mapped", config, tensors, "model.safetensors")
    assert "a part of the vocabulary only (token_map), which is not supported" in failure(folder)


def without_lm_heads(**others: np.ndarray) -> Any:
    return {f"{number}.2.weight": ... for number in range(1, 4)} | others


BLOCKS = {f"{head}.{layer}.linear.weight": ... for head in range(4) for layer in range(2)}


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"0.1.linear.weight": ONES}, "0.1.linear.weight is not equal to 0.0.linear.weight, but"),
        ({"1.0.linear.weight": ...}, "missing: 1.0.linear.weight; check that both belong together"),
        ({"2.1.linear.bias": ...}, "missing: 2.1.linear.bias;"),
        (without_lm_heads(), "missing: 1.2.weight, 2.2.weight, 3.2.weight;"),
        ({"4.1.weight": ONES[:1].repeat(40, 0)}, "unexpected: 4.1.weight;"),
        ({"norm.weight": ONES[0]}, "unexpected: norm.weight;"),
        ({"0.0.linear.bias": ONES}, "wrong shape: 0.0.linear.bias is (32, 32), expected (32,);"),
        ({"0.0.linear.weight": np.ones((31, 32))}, "a target of hidden size 31, but this one has"),
        ({"0.2.weight": np.ones((41, 32))}, "a target of vocabulary 41, but this one has 40; give"),
        ({"0.0.linear.weight": ONES.astype(np.int8)}, "quantised weights are not supported: 0.0."),
        ({"midlayer.mlp.up_proj.weight": ONES}, "holds an EAGLE-3 head"),
        (BLOCKS, "holds no Medusa head: there is no tensor such as 0.0.linear.weight; give the"),
        (BLOCKS | {"fc.weight": np.ones((32, 64))}, "holds an EAGLE, EAGLE-2 or HASS head; give a"),
        (BLOCKS | {"model.norm.weight": ONES[0]}, "holds a whole model; give a Medusa head"),
        (BLOCKS | {"hydra_mlp.0.1.linear.weight": ONES}, "holds a Hydra head; give a Medusa head"),
    ],
)
def test_weights_that_are_refused(tmp_path, changes, told):
    tensors = {name: t for name, t in (published() | changes).items() if t is not ...}
    message = failure(write(tmp_path / "heads", HUB_CONFIG, tensors))
    assert message.startswith(str(tmp_path / "heads")) and told in message


@pytest.mark.parametrize(
    "name, content, told",
    [
        ("config.json", None, "holds no config.json; give the folder of a Medusa head"),
        ("config.json", b"{", "config.json is not valid JSON"),
        (WEIGHTS, None, "holds no weights (medusa_lm_head.safetensors or medusa_lm_head.pt or"),
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
    (folder / WEIGHTS).rename(folder / "medusa_lm_head.pt")
    assert "medusa_lm_head.pt is damaged or holds no weights; download it" in failure(folder)


# ---- What is not saved ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, told",
    [
        ({"layout": "trt"}, "layout 'trt' is unknown; choose specjax, medusa, vllm"),
        ({"target": replace(TARGET, vocab_size=41)}, "for a target of vocabulary 40, but this one"),
        ({"layout": "vllm", "target_params": None}, "which vLLM reads from their file; give the"),
        (
            {"layout": "vllm", "target_params": {"lm_head": {"weight": jnp.ones((32, 32))}}},
            "wrong shape: lm_head is (32, 32), expected (40, 32); give the target of these heads",
        ),
    ],
)
def test_what_does_not_belong_together_is_not_saved(tmp_path, given, told):
    with pytest.raises(SpecjaxError, match=re.escape(told)):
        save(tmp_path / "heads", has_lm_heads=False, **given)
    assert not list(tmp_path.iterdir())


def test_params_of_other_heads_are_not_saved(tmp_path):
    fewer = MedusaHeads(MedusaConfig(32, 40, num_heads=1))
    with pytest.raises(SpecjaxError, match=r"unexpected: blocks_1\.bias, .*give the heads of"):
        save_medusa(tmp_path / "heads", fewer, medusa_head()[1], "float32", target=TARGET)
    assert not list(tmp_path.iterdir())


def test_without_torch_its_file_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SpecjaxError, match=r"medusa_lm_head\.pt needs torch to be written; run"):
        save(tmp_path / "heads", "medusa")
    assert not list(tmp_path.iterdir())


def test_a_failed_save_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("specjax.models.io.huggingface.save_file", fail)
    with pytest.raises(SpecjaxError, match="No space left on device"):
        save(tmp_path / "heads")
    assert not list(tmp_path.iterdir())
