"""Rules of the files of Medusa and Hydra alone: heads that use the target's LM head, and vLLM's."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.checkpoints import edit_config
from tests.models.heads import (
    HEADS,
    TARGET,
    TARGET_PARAMS,
    TIED,
    assert_same,
    config_of,
    failure,
    load,
    params_of,
    published,
    save,
    stored,
    vllm_names,
    write,
)


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
    kind, given = name.split(",")[0], TIED if tied else {}
    if tied:
        config = HEADS[name].config
        layers = replace(config.layers, tie_word_embeddings=True)
        given = given | {"head": type(HEADS[name])(replace(config, layers=layers))}
    folder = save(tmp_path / "head", name, kind, target_name="lmsys/vicuna-7b-v1.3", **given)
    assert config_of(folder)["base_model_name_or_path"] == "lmsys/vicuna-7b-v1.3"
    assert {path.name for path in folder.iterdir()} == {"config.json", f"{kind}_lm_head.pt"}
    expected = published(name)
    if "no LM heads" in name:
        place = "hydra_lm_head.{}.1." if "prefix" in name else "hydra_lm_head.{}."
        table = TARGET_PARAMS["embed_tokens" if tied else "lm_head"]["weight"]
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
    expected = vllm_names(published(name))
    if not has_lm_heads:
        table = TARGET_PARAMS["embed_tokens" if tied else "lm_head"]["weight"]
        expected["lm_heads.0.weight"] = np.asarray(table)
    assert_same(stored(folder), expected)
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
        for name, tensor in vllm_names(published("medusa, no LM heads")).items()
        if not name.endswith(".bias")
    }
    tensors["medusa_heads.lm_heads.0.weight"] = np.zeros((61, 32), np.float32)
    config = {"model_type": "medusa", "num_heads": 4, "original_lm_head": True}
    folder = write(tmp_path / "head", config, tensors, "model.safetensors")
    module, loaded = load(folder, "medusa")
    assert module.config == HEADS["medusa, no LM heads"].config
    expected = params_of("medusa, no LM heads")
    assert_same(loaded, {name: each | {"bias": jnp.zeros(32)} for name, each in expected.items()})
    edit_config(folder, logit_scale=None, truncated_vocab_size=None)
    assert load(folder, "medusa")[0].config == module.config
    edit_config(folder, medusa_fc_bias=True)
    assert "missing: blocks.0.layers.0.bias, " in failure(folder, "medusa")
