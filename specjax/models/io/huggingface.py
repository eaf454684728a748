"""Hugging Face weights <-> our params: one table of names, read one tensor at a time.

Notable choices: everything that a checkpoint lacks or has wrong is told at once, from the file
headers, before any weight is read; each tensor goes to the device as stored and is cast there, so
that no more than one is in memory twice.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from safetensors.numpy import save_file

from specjax.core.errors import SpecjaxError
from specjax.models.config import TransformerConfig
from specjax.models.families import config_values
from specjax.models.io.checkpoint import first_few, mismatches, new_folder
from specjax.models.io.weights import FLOATS, StoredTensor, import_torch, stored_tensors
from specjax.models.transformer import Transformer

NAMES = (  # our path, Hugging Face's name; {} is the number of a layer
    ("embed_tokens.", "model.embed_tokens."),
    ("layers_{}.", "model.layers.{}."),
    ("norm.", "model.norm."),
    ("lm_head.", "lm_head."),
)
ROTARY_BUFFER = re.compile(r"(.+\.)?rotary_emb\.inv_freq")  # in old files; config.json decides it


def huggingface_name(path: str) -> str:
    """The Hugging Face name of a Llama param: `layers_0.mlp.up_proj.weight` and so on.

    Raises:
        SpecjaxError: if the param is not one of a Llama.
    """
    return _translate(path, NAMES)


def param_path(name: str) -> str:
    """Our path of a Llama weight with this Hugging Face name.

    Raises:
        SpecjaxError: if the weight is not one of a Llama.
    """
    return _translate(name, [(theirs, ours) for ours, theirs in NAMES])


def _translate(name: str, table: Sequence[tuple[str, str]]) -> str:
    for source, target in table:
        pattern = re.escape(source).replace(r"\{\}", r"(\d+)")
        if match := re.match(pattern, name):
            return target.format(*match.groups()) + name[match.end() :]
    raise SpecjaxError(f"{name} is not a weight of a Llama; give the weights of a target model")


def expected_weights(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every weight of a model with this config, by Hugging Face name."""
    shapes = jax.eval_shape(Transformer(config).initialise, jax.random.key(0))
    return {huggingface_name(path): leaf.shape for path, leaf in _leaves(shapes).items()}


def load_llama(
    folder: Path, config: TransformerConfig, dtype: DTypeLike, progress: bool = False
) -> dict[str, Any]:
    """Reads the weights of a Hugging Face folder into params of `Transformer(config)`.

    Args:
        folder: holds `model.safetensors`, or shards with an index, or the same as old `.bin` files.
        config: what `read_config(folder)` says.
        dtype: of the params, whatever the files store.
        progress: show a bar on stderr, if that is a terminal.

    Raises:
        SpecjaxError: if a file is missing or damaged, or the weights do not fit `config`.
    """
    folder = Path(folder)
    expected = expected_weights(config)
    stored = stored_tensors(folder)
    found = {
        name: tensor
        for name, tensor in stored.items()
        if not ROTARY_BUFFER.fullmatch(name)
        and not (config.tie_word_embeddings and name == "lm_head.weight")  # a copy of the table
    }
    check_weights(folder, found, expected)
    wanted = {param_path(name): tensor for name, tensor in found.items()}
    return read_params(wanted, dtype, f"Loading {folder.name}", progress)


def save_llama(
    folder: Path, config: TransformerConfig, params: Mapping[str, Any], dtype: DTypeLike
) -> None:
    """Writes `config.json` and `model.safetensors`, in `dtype`, into a new `folder`, atomically.

    Raises:
        SpecjaxError: if `folder` already holds something or cannot be written, or if `params` are
            not those of `config`.
    """
    leaves = {huggingface_name(path): leaf for path, leaf in _leaves(params).items()}
    shapes = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
    if complaints := mismatches(shapes, expected_weights(config)):
        raise SpecjaxError(f"cannot save {folder}: {complaints}; give the config of these params")
    write_weights(folder, config_values(config), leaves, dtype)


def write_weights(
    folder: Path,
    config: Mapping[str, Any],
    leaves: Mapping[str, Any],
    dtype: DTypeLike,
    file: str = "model.safetensors",
) -> None:
    """Writes the JSON object `config` and the arrays `leaves`, by name, into a new `folder`.

    A `file` that ends in `.pt` is written by torch.

    Raises:
        SpecjaxError: if `folder` already holds something or cannot be written, or torch is needed
            and not installed.
    """
    kind = jnp.dtype(dtype).name
    values = {**config, "dtype": kind, "torch_dtype": kind}  # new and old spelling
    torch = (
        import_torch(file, "written", "choose a layout in safetensors")
        if file.endswith(".pt")
        else None
    )
    with new_folder(folder) as unfinished:
        tensors = {
            name: np.ascontiguousarray(jnp.asarray(leaf).astype(dtype))
            for name, leaf in leaves.items()
        }
        weights_file, config_file = unfinished / file, unfinished / "config.json"
        if torch is None:
            save_file(tensors, weights_file, metadata={"format": "pt"})
        else:
            plain = {name: _to_torch(torch, each) for name, each in tensors.items()}
            torch.save(plain, weights_file)
        config_file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        shutil.copymode(config_file, weights_file)  # safetensors lets nobody else read its file


def _to_torch(torch: Any, array: np.ndarray) -> Any:
    if array.dtype == jnp.bfloat16:  # which numpy hands over as bits only
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def check_weights(
    folder: Path, found: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises SpecjaxError, which names `folder`, unless the tensors are floats and as `expected`.

    All that is wrong is told at once; nothing but headers has been read yet.
    """
    if complaints := mismatches({name: each.shape for name, each in found.items()}, expected):
        raise SpecjaxError(
            f"{folder}: the weights do not fit config.json; {complaints}; "
            "check that both belong together, or download the checkpoint again"
        )
    odd = [f"{name} ({found[name].dtype})" for name in expected if found[name].dtype not in FLOATS]
    if odd:
        raise SpecjaxError(
            f"{folder}: quantised weights are not supported: {first_few(odd)}; "
            f"use a checkpoint stored as {', '.join(FLOATS)}"
        )


def read_params(
    tensors: Mapping[str, StoredTensor], dtype: DTypeLike, title: str, progress: bool
) -> dict[str, Any]:
    """Reads tensors, given by their paths in our params, into nested params of this dtype."""
    flat = {}
    total = sum(tensor.num_bytes for tensor in tensors.values())
    with _progress_bar(title, total, progress) as advance:
        for path, tensor in tensors.items():
            flat[path] = jnp.array(tensor.read()).astype(dtype)
            advance(tensor.num_bytes)
    return unflatten_dict(flat, sep=".")


def _leaves(params: Mapping[str, Any]) -> dict[str, Any]:
    return dict(flatten_dict(params, sep="."))


@contextmanager
def _progress_bar(title: str, total: int, wanted: bool) -> Iterator[Callable[[int], None]]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    hidden = not (wanted and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(title, total=total)
        yield lambda num_bytes: bar.advance(task, num_bytes)
