"""Saves and restores params together with a config, in one folder, through Orbax.

A checkpoint folder holds `params/` (Orbax) and `config.json` (any JSON, such as the shape of the
model and the recipe of the run). Orbax is imported on first use, because importing it takes longer
than the rest of the package.
"""

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax

from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user, read_json, readable, writable

PARAMS = "params"
CONFIG = "config.json"
CHECKPOINTS = "checkpoints"  # the subfolder of a training run
MAX_NAMED = 8  # weights named in an error; the rest are counted


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty sibling of `folder` and renames it to `folder` if the block succeeds.

    After a failure or an interrupt neither of the two exists.

    Raises:
        SpecjaxError: if `folder` is not empty, or cannot be written.
    """
    folder = vacant(folder)
    unfinished = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.unfinished")
    try:
        with writable(folder):
            unfinished.mkdir(parents=True)
            yield unfinished
            if folder.exists():
                folder.rmdir()
            os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def vacant(folder: Path) -> Path:
    """Returns the absolute path of `folder`, which must not exist yet or be empty.

    Raises:
        SpecjaxError: if `folder` is not empty, or cannot be read.
    """
    folder = _absolute(folder)
    with writable(folder):
        is_vacant = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_vacant:
        raise SpecjaxError(
            f"{folder} already exists and is not an empty folder; delete it or choose another name"
        )
    return folder


def _absolute(folder: Path) -> Path:
    return Path(os.path.realpath(expand_user(folder)))


def mismatches(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> str:
    """Returns how the names and shapes `found` differ from `expected`; empty if they agree."""
    misshapen = [
        f"{name} is {found[name]}, expected {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    groups = {
        "missing": [name for name in expected if name not in found],
        "wrong shape": misshapen,
        "unexpected": [name for name in found if name not in expected],
    }
    return "; ".join(f"{title}: {first_few(names)}" for title, names in groups.items() if names)


def first_few(names: list[str]) -> str:
    """Joins the first names of a list, and says how many more there are."""
    rest = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def save_checkpoint(folder: Path, params: Any, config: Mapping[str, Any]) -> None:
    """Writes `params` (a pytree of arrays) and `config` (any JSON) to a new `folder`, atomically.

    For a single process; a run on many hosts saves through Orbax's own manager.

    Raises:
        SpecjaxError: if `folder` is not empty, or cannot be written.
    """
    import orbax.checkpoint as ocp

    text = json.dumps(config, indent=2) + "\n"
    with new_folder(folder) as unfinished:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(unfinished / PARAMS, params)
        (unfinished / CONFIG).write_text(text, encoding="utf-8")


def restore_checkpoint(folder: Path, like: Any = None) -> tuple[Any, dict[str, Any]]:
    """Reads `(params, config)` from a folder written by `save_checkpoint`.

    Args:
        folder: the checkpoint.
        like: a pytree of arrays or `jax.ShapeDtypeStruct`s with the wanted structure, dtype and
            sharding; without it, nested dicts of arrays as saved, on the default device.

    Raises:
        SpecjaxError: if the folder is not a checkpoint, is damaged, or does not fit `like`.
    """
    import orbax.checkpoint as ocp

    folder = _absolute(folder)
    config = _read_config(folder)
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            saved = checkpointer.metadata(folder / PARAMS).item_metadata.tree
            wrong = "" if like is None else mismatches(shapes_of(saved), shapes_of(like))
            if not wrong:
                target = _on_default_device(saved) if like is None else like
                return checkpointer.restore(folder / PARAMS, target), config
        except Exception as error:  # Orbax and TensorStore raise many types for a damaged file
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise SpecjaxError(
                f"{folder / PARAMS} cannot be read ({reason}); save or copy the checkpoint again"
            ) from error
    raise SpecjaxError(f"{folder} does not fit this model: {wrong}; check its {CONFIG}")


def _read_config(folder: Path) -> dict[str, Any]:
    with readable(folder):
        is_checkpoint = (folder / CONFIG).is_file() and (folder / PARAMS).is_dir()
    if not is_checkpoint:
        raise SpecjaxError(
            f"{folder} is not a checkpoint: it needs {CONFIG} and {PARAMS}/; "
            "give a folder that specjax saved"
        )
    return read_json(folder / CONFIG)


def _on_default_device(saved: Any) -> Any:
    # The device it was saved from may not exist here.
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), saved
    )


def shapes_of(params: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each leaf by its path, such as `layers_0.norm.weight`."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    # Orbax restores tuples as lists and structs as dicts; simple names are the same for all.
    name = partial(jax.tree_util.keystr, simple=True, separator=".")
    return {name(path): tuple(getattr(leaf, "shape", ())) for path, leaf in leaves}
