import json
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from specjax.core.errors import SpecjaxError
from specjax.models.io.weights import FLOATS, stored_tensors

TENSORS = {
    code: np.arange(12).reshape(3, 4).astype(dtype) for code, dtype in FLOATS.items()
}  # one of each dtype, named after it


def save_safetensors(folder):
    save_file(TENSORS, folder / "model.safetensors")
    return folder / "model.safetensors"


def save_shards(folder):
    """Two shards; the path of the second."""
    index = {}
    for number, names in enumerate([["F64", "F32"], ["F16", "BF16"]]):
        shard = f"model-{number}.safetensors"
        save_file({name: TENSORS[name] for name in names}, folder / shard)
        index |= dict.fromkeys(names, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder / "model-1.safetensors"


def save_bin(folder):
    torch = pytest.importorskip("torch")
    tensors = {
        code: torch.arange(12).reshape(3, 4).to(getattr(torch, dtype.name))
        for code, dtype in FLOATS.items()
    }
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


every_form = pytest.mark.parametrize("save", [save_safetensors, save_shards, save_bin])


def failure(folder) -> str:
    """The one-line message of a read that must fail."""
    with pytest.raises(SpecjaxError) as caught:
        stored_tensors(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@every_form
def test_every_dtype_is_read_from_every_form(tmp_path, save):
    save(tmp_path)
    stored = stored_tensors(tmp_path)
    assert stored.keys() == TENSORS.keys()
    for code, expected in TENSORS.items():
        assert stored[code].dtype == code
        assert stored[code].shape == (3, 4)
        assert stored[code].num_bytes == expected.nbytes
        assert stored[code].read().dtype == expected.dtype
        np.testing.assert_array_equal(stored[code].read(), expected)


@every_form
def test_a_truncated_file_is_named(tmp_path, save):
    path = save(tmp_path)
    whole = path.read_bytes()
    for size in (0, 5, 100, -7):  # the last two cut the header and the end
        path.write_bytes(whole[:size])
        message = failure(tmp_path)
        assert message.startswith(str(path)) and message.endswith("download it again")


def test_a_missing_shard_is_named(tmp_path):
    path = save_shards(tmp_path)
    path.unlink()
    message = failure(tmp_path)
    assert message.startswith(
        f"{tmp_path} has no {path.name}, listed in model.safetensors.index.json"
    )
    assert message.endswith("download the checkpoint again")


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_named(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    message = failure(tmp_path)
    assert message.endswith("index.json is not a valid index of shards; download it again")


def test_shards_are_looked_for_in_the_folder_only(tmp_path):
    (tmp_path / "inside").mkdir()
    save_safetensors(tmp_path)
    index = {"weight_map": {"F32": "../model.safetensors"}}
    (tmp_path / "inside" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "inside has no model.safetensors" in failure(tmp_path / "inside")


def test_a_folder_without_weights_is_refused(tmp_path):
    message = failure(tmp_path)
    assert message.startswith(f"{tmp_path} holds no weights (model.safetensors or")
    assert message.endswith("download the checkpoint again")


def test_a_bin_file_that_would_run_code_is_refused(tmp_path):
    path = save_bin(tmp_path)
    sys.modules["torch"].save({"model.norm.weight": pytest.raises}, path)
    assert failure(tmp_path).endswith("damaged or holds no weights; download it again")


def test_a_bin_file_without_torch_says_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "torch", None)
    message = failure(tmp_path)
    assert "pytorch_model.bin needs torch" in message
    assert "pip install torch" in message
