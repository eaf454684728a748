import json
import sys
from functools import partial

import numpy as np
import pytest
from safetensors.numpy import save_file

from specjax.models.io.weights import FLOATS, stored_tensors
from tests.models.checkpoints import failure

NUMBERS = np.arange(12).reshape(3, 4)
TENSORS = {code: NUMBERS.astype(dtype) for code, dtype in FLOATS.items()}  # named after dtypes


def save_safetensors(folder):
    save_file(TENSORS, folder / "model.safetensors")
    return folder / "model.safetensors"


def in_shards(folder, file, save):
    """Two shards; the path of the second."""
    index = {}
    for number, names in enumerate([["F64", "F32"], ["F16", "BF16"]]):
        path = folder / file.replace(".", f"-{number}.")
        save({name: TENSORS[name] for name in names}, path)
        index |= dict.fromkeys(names, path.name)
    (folder / f"{file}.index.json").write_text(json.dumps({"weight_map": index}))
    return path


def save_shards(folder):
    return in_shards(folder, "model.safetensors", save_file)


def save_torch(tensors, path, **options):
    torch = pytest.importorskip("torch")
    numbers = torch.from_numpy(NUMBERS)
    wanted = {code: numbers.to(getattr(torch, FLOATS[code].name)) for code in tensors}
    torch.save(wanted, path, **options)
    return path


def save_bin(folder):
    return save_torch(TENSORS, folder / "pytorch_model.bin")


def save_old_bin_shards(folder):
    save = partial(save_torch, _use_new_zipfile_serialization=False)
    return in_shards(folder, "pytorch_model.bin", save)


every_form = pytest.mark.parametrize(
    "save", [save_safetensors, save_shards, save_bin, save_old_bin_shards]
)


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
        message = failure(stored_tensors, tmp_path)
        assert message.startswith(str(path)) and message.endswith("download it again")


def test_a_missing_shard_and_a_folder_without_weights_are_named(tmp_path):
    message = failure(stored_tensors, tmp_path)
    assert message.startswith(f"{tmp_path} holds no weights (model.safetensors or")
    assert message.endswith("download the checkpoint again")
    path = save_shards(tmp_path)
    path.unlink()
    message = failure(stored_tensors, tmp_path)
    listed = f"{path.name}, listed in model.safetensors.index.json"
    assert message.startswith(f"{tmp_path} has no {listed}")
    assert message.endswith("download the checkpoint again")


INVALID = "index.json is not a valid index of shards; download it again"


@pytest.mark.parametrize(
    "content, complaint",
    [
        ("{", "index.json is not valid JSON"),
        ("[]", "index.json does not hold a JSON object"),
        ('{"weight_map": {"a": 1}}', INVALID),
        ('{"weight_map": {"F32": "../model.safetensors"}}', "inside has no model.safetensors"),
    ],
)
def test_a_damaged_index_or_one_of_shards_elsewhere_is_refused(tmp_path, content, complaint):
    save_safetensors(tmp_path)
    folder = tmp_path / "inside"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(content)
    assert complaint in failure(stored_tensors, folder)


def test_a_bin_file_that_would_run_code_is_refused(tmp_path):
    path = save_bin(tmp_path)
    sys.modules["torch"].save({"model.norm.weight": pytest.raises}, path)
    message = failure(stored_tensors, tmp_path)
    assert message.endswith("damaged or holds no weights; download it again")


def test_a_bin_file_without_torch_says_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "torch", None)
    message = failure(stored_tensors, tmp_path)
    assert "pytorch_model.bin needs torch" in message
    assert "pip install torch" in message
