"""ParallelSpec heads to and from files; what both share with EAGLE heads: test_eagle_files.py."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from specjax.core.errors import SpecjaxError
from specjax.models.config import Rope, TransformerConfig
from specjax.models.heads.eagle import EagleConfig, EagleHead
from specjax.models.heads.eagle_files import load_eagle, save_eagle
from specjax.models.heads.files import check_owner, read_about
from specjax.models.heads.parallel import ParallelConfig, ParallelHead
from specjax.models.heads.parallel_files import load_parallel, save_parallel
from tests.models import checkpoints
from tests.models.test_eagle_files import (
    PUBLISHED_KEYS,
    TARGET,
    WEIGHTS,
    assert_same,
    config_of,
    random_params,
    rewrite,
)

KINDS: dict[str, dict[str, Any]] = {
    "features": {"fc_bias": True},
    "tokens": {"reads_features": False},
}
every_head = pytest.mark.parametrize("kind", KINDS)


def make_head(kind: str, **changes) -> ParallelHead:
    config = ParallelConfig.for_target(TARGET, num_masks=3, **KINDS[kind])
    return ParallelHead(replace(config, layers=replace(config.layers, **changes)))


def save(folder: Path, kind: str, **changes) -> tuple[ParallelHead, dict]:
    head: Any = make_head(kind, **changes)
    params = random_params(head)
    save_parallel(folder, head, params, "float32", target=TARGET)
    return head, params


@pytest.fixture
def saved(tmp_path) -> Path:
    """A good head that reads features, for a test to damage."""
    save(tmp_path / "head", "features")
    return tmp_path / "head"


def failure(folder: Path, target: TransformerConfig = TARGET) -> str:
    """The one-line message of a load that must fail."""
    with pytest.raises(SpecjaxError) as caught:
        load_parallel(folder, target, "float32")
    assert str(caught.value).startswith(str(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- Round trips -------------------------------------------------------------------------------


@every_head
@pytest.mark.parametrize(
    "changes",
    [{}, {"num_hidden_layers": 2, "attention_bias": True, "rope": Rope("linear", factor=2.0)}],
    ids=["one layer", "other settings"],
)
def test_what_is_saved_is_loaded(tmp_path, kind, changes):
    head, params = save(tmp_path / "head", kind, **changes)
    again, loaded = load_parallel(tmp_path / "head", TARGET, "float32")
    assert again.config == head.config
    assert_same(loaded, params)


def test_the_dtypes_of_file_and_params_are_chosen(tmp_path, saved):
    head, params = load_parallel(saved, TARGET, "float32")
    save_parallel(tmp_path / "narrow", head, params, "bfloat16", target=TARGET)
    stored = load_file(tmp_path / "narrow" / WEIGHTS)
    assert {tensor.dtype for tensor in stored.values()} == {jnp.dtype("bfloat16")}
    _, loaded = load_parallel(tmp_path / "narrow", TARGET, "float32")
    rounded = jax.tree.map(lambda leaf: leaf.astype("bfloat16").astype("float32"), params)
    assert_same(loaded, rounded)


@every_head
def test_a_file_holds_eagles_names_and_the_masks(tmp_path, kind):
    head, params = save(tmp_path / "head", kind)
    stored, config = load_file(tmp_path / "head" / WEIGHTS), config_of(tmp_path / "head")
    of_layer = PUBLISHED_KEYS - {"fc.weight"}
    if kind == "features":
        own = {"fc.weight", "fc.bias", "mask_hidden"}
        assert config["bias"] is True
        np.testing.assert_array_equal(stored["mask_hidden"], params["mask_hidden"])
    else:
        own = {"layers.0.input_layernorm.weight", "norm.weight"}
        assert "bias" not in config
    assert stored.keys() == of_layer | own | {"mask_embeddings.weight"}
    assert stored["mask_embeddings.weight"].shape == (3, 32)
    assert config["architectures"] == ["ParallelSpecHead"]
    assert (config["num_masks"], config["reads_features"]) == (3, kind == "features")
    again, loaded = load_parallel(tmp_path / "head", TARGET, "float32")
    assert again.config == head.config
    assert_same(loaded, params)


def test_a_head_of_mistral_looks_at_all_of_the_text(tmp_path):
    target = replace(TARGET, model_type="mistral", sliding_window=8)
    head: Any = ParallelHead(ParallelConfig.for_target(target))
    save_parallel(tmp_path / "head", head, random_params(head), "float32", target=target)
    again, _ = load_parallel(tmp_path / "head", target, "float32")
    assert again.config.layers == replace(head.config.layers, model_type="llama")
    assert again.config.layers.sliding_window is None


def test_what_it_was_trained_for_travels_along(tmp_path, saved):
    head, params = load_parallel(saved, TARGET, "float32")
    about = {"target": "ours", "method": "parallel-eagle"}
    save_parallel(tmp_path / "about", head, params, "float32", target=TARGET, about=about)
    assert read_about(tmp_path / "about") == about and read_about(saved) == {}
    with pytest.raises(SpecjaxError, match="trained for target ours, but this one is theirs"):
        check_owner(tmp_path / "about", "theirs")


# ---- What is not loaded ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"num_masks": ...}, "config.json: num_masks None is not a number from 1 on; check the"),
        ({"num_masks": 0}, "config.json: num_masks 0 is not a number from 1 on"),
        ({"num_masks": True}, "config.json: num_masks True is not a number from 1 on"),
        ({"reads_features": ...}, "reads_features None is not true or false; check the config"),
        ({"reads_features": False}, "the weights do not fit config.json; missing: layers.0.input"),
        ({"num_masks": 4}, "wrong shape: mask_embeddings.weight is (3, 32), expected (4, 32)"),
        ({"bias": False}, "says that fc has no bias, but the weights hold fc.bias; set it to true"),
        ({"bias": "no"}, "config.json: bias 'no' is not true or false"),
        ({"medusa_num_heads": 5}, "describes a Medusa head; give a ParallelSpec head"),
        ({"draft_vocab_size": 32}, "describes an EAGLE-3 head"),
        ({"hidden_size": 64}, "for a target of hidden size 64, but this one has 32; give a head"),
        ({"vocab_size": ...}, "config.json: config.json has no 'vocab_size'"),
    ],
)
def test_configs_that_are_refused(saved, changes, told):
    checkpoints.edit_config(saved, **changes)
    assert told in failure(saved)


NORM = np.ones(32, np.float32)


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"mask_hidden": ...}, "missing: mask_hidden; check that both belong together"),
        ({"mask_embeddings.weight": ...}, "holds an EAGLE, EAGLE-2 or HASS head; give a Parallel"),
        ({"norm.weight": NORM}, "unexpected: norm.weight;"),
        ({"mask_hidden": np.ones(32, np.int8)}, "quantised weights are not supported: mask_hidden"),
    ],
)
def test_weights_that_are_refused(saved, changes, told):
    rewrite(saved, **changes)
    assert told in failure(saved)


def test_heads_of_eagle_and_of_parallelspec_are_not_taken_for_each_other(tmp_path, saved):
    eagle = EagleHead(EagleConfig.for_target(TARGET))
    save_eagle(tmp_path / "eagle", eagle, random_params(eagle), "float32", target=TARGET)
    told = "holds an EAGLE, EAGLE-2 or HASS head; give a ParallelSpec head"
    assert told in failure(tmp_path / "eagle")
    with pytest.raises(SpecjaxError, match="describes a ParallelSpec head; give an EAGLE"):
        load_eagle(saved, TARGET, "float32")
    save(tmp_path / "tokens", "tokens")
    rewrite(tmp_path / "tokens", **{"mask_embeddings.weight": ...})
    assert "holds a whole model; give a ParallelSpec head" in failure(tmp_path / "tokens")


@pytest.mark.parametrize(
    "name, content, told",
    [
        ("config.json", None, "holds no config.json; give the folder of a ParallelSpec head"),
        ("config.json", b"{", "config.json is not valid JSON"),
        (WEIGHTS, None, "holds no weights (model.safetensors or"),
        (WEIGHTS, b"cut", "is damaged or cut short"),
    ],
)
def test_missing_and_damaged_files_are_named(saved, name, content, told):
    (saved / name).unlink()
    if content is not None:
        (saved / name).write_bytes(content)
    assert told in failure(saved)


# ---- What is not saved -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"layout": "vllm"}, "layout 'vllm' is unknown; choose specjax, as no server reads these"),
        ({"target": replace(TARGET, vocab_size=60)}, "a target of vocabulary 61, but this one has"),
        ({"head": make_head("tokens")}, "give the head of these params"),
    ],
)
def test_what_does_not_belong_together_is_not_saved(tmp_path, changes, told):
    head = make_head("features")
    arguments = {"head": head, "params": head.initialise(jax.random.key(0)), "target": TARGET}
    with pytest.raises(SpecjaxError, match=re.escape(told)):
        save_parallel(tmp_path / "head", dtype="float32", **arguments | changes)
    assert not list(tmp_path.iterdir())
