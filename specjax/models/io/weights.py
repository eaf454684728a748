"""Reads the tensors of a folder of weights one at a time, in any of its file formats.

Safetensors are read without torch, bfloat16 included. Old `.bin` and `.pt` files are pickles, which
torch reads, with `weights_only=True`, if it is installed.
"""

import math
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from specjax.core.errors import SpecjaxError
from specjax.core.files import read_json, readable

FORMATS = (  # single file, index of shards; the first that exists counts
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
FLOATS = {  # by their names in safetensors
    "F64": jnp.dtype("float64"),
    "F32": jnp.dtype("float32"),
    "F16": jnp.dtype("float16"),
    "BF16": jnp.dtype("bfloat16"),
}
INTEGERS = {"I32": jnp.dtype("int32"), "I64": jnp.dtype("int64")}
Index = tuple[slice, ...]


class StoredTensor(NamedTuple):
    """One tensor of a weight file; `read` loads it, or the part within some slices."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # a key of `FLOATS` or `INTEGERS`, or the file's name for another dtype
    read: Callable[..., np.ndarray]  # (index: a slice per axis, () for all)

    @property
    def num_bytes(self) -> int:
        """The size in memory; defined only for those dtypes."""
        return math.prod(self.shape) * (FLOATS | INTEGERS)[self.dtype].itemsize


def weight_files(folder: Path, names: tuple[str, ...] = ()) -> list[Path]:
    """Returns the weight files of `folder`: a single one, or all shards listed in its index.

    Single files called `names` come first; the first that exists is taken.
    """
    for name in names:
        if (folder / name).is_file():
            return [folder / name]
    for single, index in FORMATS:
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            return _shards(folder / index)
    expected = " or ".join([*names, *(name for pair in FORMATS for name in pair)])
    raise SpecjaxError(f"{folder} holds no weights ({expected}); download the checkpoint again")


def _shards(index: Path) -> list[Path]:
    content = read_json(index)
    try:
        names = set(content["weight_map"].values())
        files = [index.parent / Path(name).name for name in sorted(names)]
    except (KeyError, TypeError, AttributeError):
        raise SpecjaxError(f"{index} is not a valid index of shards; download it again") from None
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise SpecjaxError(
            f"{index.parent} has no {', '.join(missing)}, listed in {index.name}; "
            "download the checkpoint again"
        )
    return files


def stored_tensors(folder: Path, names: tuple[str, ...] = ()) -> dict[str, StoredTensor]:
    """Returns the tensors of a folder by name, in file order; reads only the headers."""
    tensors = {}
    for path in weight_files(folder, names):
        with readable(path):
            path.open("rb").close()
        of_file = _from_safetensors(path) if path.suffix == ".safetensors" else _from_torch(path)
        tensors |= {tensor.name: tensor for tensor in of_file}
    return tensors


def stored_dtype(folder: Path, names: tuple[str, ...] = ()) -> str:
    """Returns the dtype of all floats that a folder stores; float32 for several, or for a file."""
    if not folder.is_dir():
        return "float32"
    codes = {tensor.dtype for tensor in stored_tensors(folder, names).values()} & set(FLOATS)
    return FLOATS[codes.pop()].name if len(codes) == 1 and codes != {"F64"} else "float32"


def _from_safetensors(path: Path) -> list[StoredTensor]:
    def tensor_of(name: str, header: Any) -> StoredTensor:
        def read(index: Index = ()) -> np.ndarray:
            with safe_open(path, framework="numpy") as file:
                return file.get_slice(name)[index] if index else file.get_tensor(name)

        return StoredTensor(name, tuple(header.get_shape()), header.get_dtype(), read)

    try:
        with safe_open(path, framework="numpy") as file:
            return [tensor_of(name, file.get_slice(name)) for name in file.offset_keys()]
    except (SafetensorError, OSError, MemoryError) as error:
        raise SpecjaxError(f"{path} is damaged or cut short ({error}); download it again") from None


def _from_torch(path: Path) -> list[StoredTensor]:
    torch = import_torch(path)
    codes = {getattr(torch, kind.name): code for code, kind in (FLOATS | INTEGERS).items()}

    def tensor_of(name: str, tensor: Any) -> StoredTensor:
        def read(index: Index = ()) -> np.ndarray:
            plain = tensor.detach()[index].contiguous()
            if tensor.dtype is torch.bfloat16:  # which torch cannot convert to numpy
                return plain.view(torch.int16).numpy().view(FLOATS["BF16"])
            return plain.numpy()

        dtype = codes.get(tensor.dtype, str(tensor.dtype))
        return StoredTensor(name, tuple(tensor.shape), dtype, read)

    try:
        is_zip = zipfile.is_zipfile(path)  # the oldest files are not, and cannot be memory-mapped
        weights = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
        return [tensor_of(name, tensor) for name, tensor in weights.items()]
    except (RuntimeError, ValueError, EOFError, OSError, AttributeError, UnpicklingError):
        raise SpecjaxError(f"{path} is damaged or holds no weights; download it again") from None


def import_torch(
    path: Path | str, doing: str = "read", instead: str = "use a checkpoint in safetensors format"
) -> Any:
    """Imports torch, which only torch's own files need."""
    try:
        import torch
    except ImportError:
        raise SpecjaxError(
            f"{path} needs torch to be {doing}; run `pip install torch`, or {instead}"
        ) from None
    return torch


@contextmanager
def without_advice() -> Iterator[None]:
    """Keeps transformers from advising to install torch while it is imported."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(name)
    os.environ[name] = before or "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
