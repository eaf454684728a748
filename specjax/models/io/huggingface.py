"""Reads and writes the weights of a model as a folder in Hugging Face format.

All errors in a checkpoint are reported at once, from the file headers, before any weight is read.
Each tensor goes to the device as stored and is cast there, so at most one is in memory twice.
"""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from safetensors.numpy import save_file

from specjax.core.errors import SpecjaxError
from specjax.core.files import new_folder
from specjax.core.memory import check_fits, device_bytes
from specjax.core.pytree import cast_floats
from specjax.core.text import visible
from specjax.models.config import TransformerConfig
from specjax.models.families import FAMILIES, config_values
from specjax.models.families.family import LLAMA_NAMES, Names
from specjax.models.io.weights import (
    FLOATS,
    INTEGERS,
    Index,
    StoredTensor,
    import_torch,
    stored_tensors,
)
from specjax.models.native import packed_param, unpack_params
from specjax.models.precision import default_dtype
from specjax.models.quantize import has_quantized, quantize_params, quantized_param
from specjax.models.shapes import expected_shapes, first_few, mismatches, shape_mismatches
from specjax.models.sharding import Placement, on_host, place
from specjax.models.transformer import Transformer

# In old files: what follows from the config, and masks.
BUFFER = re.compile(r"(.+\.)?(rotary_emb\.inv_freq|attn\.(masked_)?bias)")
LESS = "use a smaller dtype, or quantize int8 or int4"
PACKED = (".qweight", ".qzeros", ".scales")  # of GPTQ and AWQ


def huggingface_name(path: str) -> str:
    """Returns a Llama's name of the param at a path like `layers_0.mlp.up_proj.weight`."""
    return _lookup(path, LLAMA_NAMES)[1]


def _lookup(path: str, names: Names) -> tuple[int, str]:
    """Returns the number of the entry that matches, and the stored name."""
    for row, (ours, theirs) in enumerate(names):
        pattern = re.escape(ours).replace(r"\{\}", r"(\d+)")
        if match := re.match(pattern, path):
            return row, theirs.format(*match.groups()) + path[match.end() :]
    raise SpecjaxError(f"{path} is not a weight of a target; give the weights of a target model")


def expected_weights(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every weight of a model with this config, by Hugging Face name."""
    shapes = expected_shapes(cast(Any, Transformer(config)))
    return {
        name: (sum(shapes[path][0] for path in paths), *shapes[paths[0]][1:])
        for name, paths in _stored_paths(config).items()
    }


def _stored_paths(config: TransformerConfig) -> dict[str, list[str]]:
    """Returns the paths of the params that each stored tensor holds, in the order of its rows."""
    parts_of: dict[str, list[tuple[int, str]]] = {}
    for path in expected_shapes(cast(Any, Transformer(config))):
        row, name = _lookup(path, FAMILIES[config.model_type].names)
        parts_of.setdefault(name, []).append((row, path))
    return {name: [path for _, path in sorted(parts)] for name, parts in parts_of.items()}


def _parts(tensor: StoredTensor, heights: Sequence[int]) -> Iterator[StoredTensor]:
    """Splits the rows of a stored tensor."""
    ends = np.cumsum(heights).tolist()
    for start, end in zip([0, *ends], ends, strict=False):

        def read(index: Index = (), start: int = start, end: int = end) -> np.ndarray:
            first, last, _ = (index or (slice(None),))[0].indices(end - start)
            return tensor.read((slice(start + first, start + last), *index[1:]))

        yield tensor._replace(shape=(end - start, *tensor.shape[1:]), read=read)


def by_param(
    config: TransformerConfig, stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Returns the tensors by the paths of their params; one that several share is split."""
    shapes, tensors = expected_shapes(cast(Any, Transformer(config))), {}
    for name, paths in _stored_paths(config).items():
        heights = [shapes[path][0] for path in paths]
        tensors |= dict(zip(paths, _parts(stored[name], heights), strict=True))
    return tensors


def load_transformer(
    folder: Path,
    config: TransformerConfig,
    dtype: DTypeLike | None,
    progress: bool = False,
    quantize: str | None = None,
    placement: Placement | None = None,
    packed: bool = False,
) -> dict[str, Any]:
    """Reads the weights of a Hugging Face folder into params of `Transformer(config)`.

    `config` comes from `read_config(folder)`. Without `dtype` it is that of `default_dtype`;
    `quantize` is int8 or int4; `packed` packs each matrix for native products.
    `progress` shows a bar on stderr, if that is a terminal.
    """
    folder = Path(folder)
    stored = stored_tensors(folder)
    if config.num_hidden_layers > len(stored):  # before that many are made
        raise SpecjaxError(
            f"{folder}: config.json describes {config.num_hidden_layers} layers, but there are "
            f"{len(stored)} weights; check that both belong together"
        )
    expected = expected_weights(config)
    weights = {
        name: tensor
        for name, tensor in stored.items()
        if not BUFFER.fullmatch(name)
        and not (config.tie_word_embeddings and name == "lm_head.weight")  # a copy of the table
    }
    check_weights(folder, weights, expected)
    dtype = dtype or dtype_for(config, packed)
    title, tensors = f"Loading {folder.name}", by_param(config, weights)
    return read_params(tensors, dtype, title, progress, quantize, placement, packed)


def dtype_for(config: TransformerConfig, packed: bool) -> jnp.dtype:
    """Returns the default dtype of a model with this config; see `default_dtype`."""
    num_params = sum(math.prod(shape) for shape in expected_weights(config).values())
    return default_dtype(num_params, packed)


def save_transformer(
    folder: Path, config: TransformerConfig, params: Mapping[str, Any], dtype: DTypeLike
) -> None:
    """Writes `config.json` and `model.safetensors`, in `dtype`, to a new `folder`, atomically."""
    if wrong := shape_mismatches(params, Transformer(config)):
        raise SpecjaxError(f"cannot save {folder}: {wrong}; give the config of these params")
    if has_quantized(params):
        raise SpecjaxError(f"cannot save {folder}: the params are quantised; load them as floats")
    flat = cast(Any, flatten_dict(unpack_params(params), sep="."))
    stored = _stored_paths(config)
    leaves = {
        name: jnp.concatenate([flat[path] for path in paths]) if paths[1:] else flat[paths[0]]
        for name, paths in stored.items()
    }
    write_weights(folder, config_values(config), leaves, dtype)


def write_index(folder: Path) -> None:
    """Writes the index of a single weight file, where EAGLE's code looks for the embedding."""
    stored = stored_tensors(folder)
    index = {
        "metadata": {"total_size": sum(tensor.num_bytes for tensor in stored.values())},
        "weight_map": dict.fromkeys(stored, "model.safetensors"),
    }
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_weights(
    folder: Path,
    config: Mapping[str, Any],
    leaves: Mapping[str, Any],
    dtype: DTypeLike,
    file: str = "model.safetensors",
) -> None:
    """Writes the JSON object `config` and the named arrays `leaves` to a new `folder`.

    torch writes a `file` that ends in `.pt`. All processes of a run call this; the first writes.
    """
    kind = jnp.dtype(dtype).name
    values = {**config, "dtype": kind, "torch_dtype": kind}  # the new and the old key
    torch = None
    if file.endswith(".pt"):
        torch = import_torch(file, "written", "choose a layout in safetensors")
    tensors = {
        name: np.asarray(cast_floats(on_host(leaf), dtype), order="C")
        for name, leaf in leaves.items()
    }
    if jax.process_index() > 0:
        return
    with new_folder(folder) as unfinished:
        weights_file, config_file = unfinished / file, unfinished / "config.json"
        if torch is None:
            save_file(tensors, weights_file, metadata={"format": "pt"})
        else:
            plain = {name: _to_torch(torch, tensor) for name, tensor in tensors.items()}
            torch.save(plain, weights_file)
        config_file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        shutil.copymode(config_file, weights_file)  # safetensors lets only the owner read


def _to_torch(torch: Any, array: np.ndarray) -> Any:
    if array.dtype == jnp.bfloat16:  # of which torch takes only the bits
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def check_weights(
    folder: Path,
    tensors: Mapping[str, StoredTensor],
    expected: Mapping[str, tuple[int, ...]],
    integers: Sequence[str] = (),
) -> None:
    """Raises SpecjaxError, naming `folder`, unless the tensors are floats of the expected shapes.

    Those named `integers` are whole numbers instead. Reports all errors at once, from the headers
    alone.
    """
    if any(name.endswith(PACKED) for name in tensors):
        raise SpecjaxError(
            f"{folder}: weights quantised by GPTQ or AWQ are not supported; use the original "
            "model, with quantize int8 or int4 if it should be small"
        )
    if wrong := mismatches({name: tensor.shape for name, tensor in tensors.items()}, expected):
        raise SpecjaxError(
            f"{folder}: the weights do not fit config.json; {wrong}; "
            "check that both belong together, or download the checkpoint again"
        )
    odd = [
        f"{name} ({tensors[name].dtype})"
        for name in expected
        if tensors[name].dtype not in (INTEGERS if name in integers else FLOATS)
    ]
    if odd:
        raise SpecjaxError(
            f"{folder}: quantised weights are not supported: {first_few(odd)}; "
            f"use a checkpoint stored as {', '.join(FLOATS)}"
        )


def read_params(
    tensors: Mapping[str, StoredTensor],
    dtype: DTypeLike,
    title: str,
    progress: bool,
    quantize: str | None = None,
    placement: Placement | None = None,
    packed: bool = False,
) -> dict[str, Any]:
    """Reads tensors, keyed by the paths of params, into nested params; floats of this dtype.

    With `quantize` or `packed`, each matrix is converted before the next is read, the largest
    first, since a conversion holds it several times and the params are not there yet. With a
    `placement`, each part of a tensor is read straight to its devices.
    """
    _check_memory(tensors, dtype, title, quantize, placement, packed)
    flat = {}
    largest_first = sorted(tensors.items(), key=lambda item: -item[1].num_bytes)
    total = sum(tensor.num_bytes for tensor in tensors.values())
    with _progress_bar(title, total, progress) as advance:
        for path, tensor in largest_first:
            whole = placement is None
            leaf = jnp.array(tensor.read()) if whole else _spread(tensor, path, placement)
            if quantize is None:
                leaf = cast_floats(leaf, dtype)
            else:
                leaf = jax.block_until_ready(quantized_param(path, leaf, quantize, dtype))
            if jnp.dtype(dtype) == jnp.float16 and tensor.dtype not in (*INTEGERS, "F16"):
                _check_range(title, path, leaf)
            flat[path] = packed_param(path, leaf) if packed else leaf
            advance(tensor.num_bytes)
    params = unflatten_dict(flat, sep=".")
    return params if quantize is None else place(params, placement)


def _check_range(title: str, path: str, leaf: Any) -> None:
    """Raises SpecjaxError unless float16 holds all numbers of a param."""
    for part in jax.tree.leaves(leaf):
        if jnp.issubdtype(part.dtype, jnp.floating) and not jnp.isfinite(part).all():
            raise SpecjaxError(
                f"{title}: a number of {path} is NaN, infinite or too large for float16; use "
                "float32 or bfloat16"
            )


def _spread(tensor: StoredTensor, path: str, placement: Placement) -> jax.Array:
    """Reads a tensor part by part, so that the host holds one at a time."""
    sharding = placement.of(path, tensor.shape)
    devices: dict[str, list[Any]] = {}  # by the part that they hold
    indices = sharding.addressable_devices_indices_map(tensor.shape)
    for device, index in indices.items():
        devices.setdefault(repr(index), []).append(device)
    parts = []
    for holders in devices.values():
        part = tensor.read(indices[holders[0]])
        parts += jax.block_until_ready([jax.device_put(part, device) for device in holders])
    return jax.make_array_from_single_device_arrays(tensor.shape, sharding, parts)


def _check_memory(
    tensors: Mapping[str, StoredTensor],
    dtype: DTypeLike,
    title: str,
    quantize: str | None,
    placement: Placement | None,
    packed: bool,
) -> None:
    leaves = {path: jax.ShapeDtypeStruct(tensor.shape, dtype) for path, tensor in tensors.items()}
    if quantize is not None:
        leaves = jax.eval_shape(partial(quantize_params, kind=quantize), leaves)
    halves_int4 = packed or jax.default_backend() != "cpu"
    needs = {"weights": device_bytes(place(leaves, placement), halves_int4)}
    devices = None if placement is None else placement.mesh.devices.flat
    check_fits(title, needs, advice=LESS, devices=devices)


@contextmanager
def _progress_bar(title: str, total: int, is_wanted: bool) -> Iterator[Callable[[int], None]]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    hidden = not (is_wanted and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(visible(title), total=total)
        yield lambda num_bytes: bar.advance(task, num_bytes)
