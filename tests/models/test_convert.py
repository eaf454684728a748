import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.models.families import config_from, read_config
from specjax.models.io.huggingface import (
    huggingface_name,
    load_transformer,
    save_transformer,
)
from specjax.models.transformer import Transformer
from tests.models import checkpoints
from tests.models.heads import assert_same, drawn, rewrite

CONFIG = config_from({"model_type": "llama"} | checkpoints.TINY)
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def params() -> dict:
    return drawn(Transformer(CONFIG))


@pytest.fixture
def folder(tmp_path, params):
    """A good checkpoint, made without torch, for a test to damage."""
    save_transformer(tmp_path / "checkpoint", CONFIG, params, jnp.float32)
    return tmp_path / "checkpoint"


def load(folder, dtype=jnp.float32):
    return load_transformer(folder, read_config(folder), dtype)


@pytest.mark.parametrize("name", ["head_0.weight", "layers_x.weight", "model.layers.weight"])
def test_a_weight_that_no_llama_has_is_refused(name):
    with pytest.raises(SpecjaxError, match=f"{re.escape(name)} is not a weight of a target"):
        huggingface_name(name)


@pytest.mark.parametrize(
    "stored, wanted",
    [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")],
)
def test_weights_are_cast_from_any_dtype_to_any(params, tmp_path, stored, wanted):
    save_transformer(tmp_path / "cast", CONFIG, params, stored)
    expected = jax.tree.map(lambda leaf: leaf.astype(stored).astype(wanted), params)
    assert_same(load(tmp_path / "cast", wanted), expected)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_weight_too_large_for_float16_is_refused(folder, params, quantize):
    large = np.asarray(params["norm"]["weight"]).copy()
    large[3] = 1e6
    rewrite(folder, **{"model.norm.weight": large})
    options = {"quantize": quantize}
    load_transformer(folder, read_config(folder), jnp.bfloat16, **options)
    with pytest.raises(SpecjaxError, match=r"norm\.weight is NaN, infinite or too large for"):
        load_transformer(folder, read_config(folder), jnp.float16, **options)


def test_buffers_of_old_checkpoints_and_a_copy_of_the_table_are_ignored(folder, params):
    rewrite(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)})
    checkpoints.edit_config(folder, tie_word_embeddings=True)
    assert_same(load(folder), {name: params[name] for name in params if name != "lm_head"})


@pytest.mark.parametrize(
    "dtype, settings",
    [
        ("float32", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
        ("bfloat16", {"kind": "mistral", "sliding_window": 6}),
        ("float16", checkpoints.LINEAR),
    ],
)
def test_transformers_reads_what_we_save(tmp_path, settings, dtype):
    torch = pytest.importorskip("torch")
    import transformers

    original = checkpoints.build(**settings)
    folder = checkpoints.save(tmp_path / "theirs", original)
    config = read_config(folder)
    save_transformer(tmp_path / "ours", config, load(folder), dtype)
    assert read_config(tmp_path / "ours") == config
    read = transformers.AutoModelForCausalLM.from_pretrained
    assert read(tmp_path / "ours").dtype is getattr(torch, dtype)
    again = read(tmp_path / "ours", dtype=torch.float32, attn_implementation="eager")
    for weight in original.parameters():
        weight.data = weight.data.to(getattr(torch, dtype)).float()
    tokens = np.arange(3, 23)[None]
    expected = checkpoints.forward(original, tokens).logits
    assert torch.equal(checkpoints.forward(again, tokens).logits, expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]


@pytest.mark.skipif(os.name != "posix", reason="file modes are those of POSIX")
def test_saved_files_follow_the_umask(tmp_path, params):
    """Whereas safetensors lets only the owner read its files."""
    before = os.umask(0o022)
    try:
        save_transformer(tmp_path / "out", CONFIG, params, jnp.float32)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes == {WEIGHTS: 0o644, "config.json": 0o644}


def test_a_failed_save_leaves_nothing_behind(tmp_path, params, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("specjax.models.io.huggingface.save_file", fail)
    (tmp_path / "out").mkdir()
    with pytest.raises(SpecjaxError, match=r"out \(No space left on device\); free some space"):
        save_transformer(tmp_path / "out", CONFIG, params, jnp.float32)
    assert [path.name for path in tmp_path.rglob("*")] == ["out"]


def test_params_of_another_model_are_not_saved(tmp_path, params):
    wrong = params | {"norm": {"weight": jnp.ones(7)}}
    message = r"wrong shape: norm\.weight is \(7,\), expected \(32,\).*give the config"
    with pytest.raises(SpecjaxError, match=message):
        save_transformer(tmp_path / "out", CONFIG, wrong, jnp.float32)
    assert not list(tmp_path.iterdir())


def test_all_mismatches_are_reported_at_once_unless_there_are_many(folder):
    missing = {"model.norm.weight": ..., "model.layers.1.mlp.up_proj.weight": ...}
    unexpected = {"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}
    wrong = {"lm_head.weight": np.ones((60, 32), np.float32)}
    rewrite(folder, **missing, **unexpected, **wrong)
    message = checkpoints.failure(load, folder)
    assert "missing: model.layers.1.mlp.up_proj.weight, model.norm.weight;" in message
    assert "wrong shape: lm_head.weight is (60, 32), expected (61, 32);" in message
    assert "unexpected: model.layers.0.self_attn.q_proj.bias;" in message
    assert "check that both belong together, or download the checkpoint again" in message
    checkpoints.edit_config(folder, num_hidden_layers=9)
    assert " and 57 more; wrong shape: " in checkpoints.failure(load, folder)


def test_quantised_weights_are_refused(folder):
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(folder, **{name: np.ones((48, 32), np.int8)})
    message = checkpoints.failure(load, folder)
    assert f"quantised weights are not supported: {name} (I8)" in message
    assert message.endswith("use a checkpoint stored as F64, F32, F16, BF16")
    packed = "model.layers.0.mlp.up_proj.qweight"  # even if the config does not say so
    rewrite(folder, **{packed: np.ones((4, 32), np.int32)})
    message = checkpoints.failure(load, folder)
    assert "weights quantised by GPTQ or AWQ are not supported; use the" in message
