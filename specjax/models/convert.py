"""Hugging Face weights <-> our params: one table of names, read one tensor at a time.

Notable choices: everything that a checkpoint lacks or has wrong is told at once, from the file
headers, before any weight is read; each tensor goes to the device as stored and is cast there, so
that no more than one is in memory twice.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from safetensors.numpy import save_file

from specjax.errors import SpecjaxError
from specjax.models.checkpoint import new_folder
from specjax.models.config import LlamaConfig
from specjax.models.llama import Llama
from specjax.models.weights import FLOATS, StoredTensor, stored_tensors

NAMES = (  # our path, Hugging Face's name
    (r"(embed_tokens|norm)\.weight", r"model.\1.weight"),
    (r"layers_(\d+)\.(.+)", r"model.layers.\1.\2"),
    (r"lm_head\.weight", r"lm_head.weight"),
)
ROTARY_BUFFER = re.compile(r"(.+\.)?rotary_emb\.inv_freq")  # in old files; config.json decides it
MOST_NAMED = 8  # weights named per complaint; the rest are counted


class Expected(NamedTuple):
    """Where one stored weight belongs among our params, and its shape."""

    path: str
    shape: tuple[int, ...]


def huggingface_name(path: str) -> str:
    """The Hugging Face name of a Llama param: `layers_0.mlp.up_proj.weight` and so on.

    Raises:
        SpecjaxError: if the param is not one of a Llama.
    """
    for ours, theirs in NAMES:
        if match := re.fullmatch(ours, path):
            return match.expand(theirs)
    raise SpecjaxError(f"{path} is not a weight of a Llama; give the params of the target model")


def expected_weights(config: LlamaConfig) -> dict[str, Expected]:
    """Every weight of a model with this config, by Hugging Face name."""
    shapes = jax.eval_shape(Llama(config).initialise, jax.random.key(0))
    flat = flatten_dict(shapes, sep=".")
    return {huggingface_name(path): Expected(path, leaf.shape) for path, leaf in flat.items()}


def load_llama(
    folder: Path, config: LlamaConfig, dtype: DTypeLike, progress: bool = False
) -> dict[str, Any]:
    """Reads the weights of a Hugging Face folder into params of `Llama(config)`.

    Args:
        folder: holds `model.safetensors`, or shards with an index, or the same as old `.bin` files.
        config: what `LlamaConfig.read(folder)` says.
        dtype: of the params, whatever the files store.
        progress: show a bar on stderr, if that is a terminal.

    Raises:
        SpecjaxError: if a file is missing or damaged, or the weights do not fit `config`.
    """
    folder = Path(folder)
    expected = expected_weights(config)
    stored = stored_tensors(folder)
    _check_stored(folder, config, stored, expected)
    wanted = [tensor for name, tensor in stored.items() if name in expected]  # in file order
    flat = {}
    total = sum(tensor.num_bytes for tensor in wanted)
    with _progress_bar(f"Loading {folder.name}", total, progress) as advance:
        for tensor in wanted:
            flat[expected[tensor.name].path] = jnp.asarray(tensor.read()).astype(dtype)
            advance(tensor.num_bytes)
    return unflatten_dict(flat, sep=".")


def save_llama(
    folder: Path, config: LlamaConfig, params: Mapping[str, Any], dtype: DTypeLike
) -> None:
    """Writes `config.json` and `model.safetensors`, in `dtype`, into a new `folder`, atomically.

    Raises:
        SpecjaxError: if `folder` already holds something or cannot be written, or if `params` are
            not those of `config`.
    """
    leaves = {huggingface_name(path): leaf for path, leaf in flatten_dict(params, sep=".").items()}
    shapes = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
    if complaints := mismatches(shapes, expected_weights(config)):
        raise SpecjaxError(f"cannot save {folder}: {complaints}; give the config of these params")
    kind = jnp.dtype(dtype).name
    values = config.to_huggingface() | {"dtype": kind, "torch_dtype": kind}  # new and old spelling
    with new_folder(folder) as unfinished:
        tensors = {
            name: np.ascontiguousarray(jnp.asarray(leaf).astype(dtype))
            for name, leaf in leaves.items()
        }
        save_file(tensors, unfinished / "model.safetensors", metadata={"format": "pt"})
        text = json.dumps(values, indent=2) + "\n"
        (unfinished / "config.json").write_text(text, encoding="utf-8")


def mismatches(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, Expected]) -> str:
    """All that is wrong with the names and shapes `found`, as one phrase; empty if they fit."""
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    misshapen = [
        f"{name} is {found[name]}, expected {shape}"
        for name, (_, shape) in expected.items()
        if name in found and found[name] != shape
    ]
    groups = {"missing": missing, "wrong shape": misshapen, "unexpected": unexpected}
    return "; ".join(f"{title}: {_first(names)}" for title, names in groups.items() if names)


def _check_stored(
    folder: Path,
    config: LlamaConfig,
    stored: Mapping[str, StoredTensor],
    expected: Mapping[str, Expected],
) -> None:
    found = {
        name: tensor.shape
        for name, tensor in stored.items()
        if not ROTARY_BUFFER.fullmatch(name)
        and not (config.tie_word_embeddings and name == "lm_head.weight")  # a copy of the table
    }
    if complaints := mismatches(found, expected):
        raise SpecjaxError(
            f"{folder}: the weights do not fit config.json; {complaints}; "
            "check that both belong together, or download the checkpoint again"
        )
    odd = [
        f"{name} ({stored[name].dtype})" for name in expected if stored[name].dtype not in FLOATS
    ]
    if odd:
        raise SpecjaxError(
            f"{folder}: quantised weights are not supported: {_first(odd)}; "
            f"use a checkpoint stored as {', '.join(FLOATS)}"
        )


def _first(names: list[str]) -> str:
    rest = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


@contextmanager
def _progress_bar(title: str, total: int, wanted: bool) -> Iterator[Callable[[int], None]]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    hidden = not (wanted and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(title, total=total)
        yield lambda num_bytes: bar.advance(task, num_bytes)
