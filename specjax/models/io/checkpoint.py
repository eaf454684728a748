"""Params with their config and recipe in one folder, through Orbax.

A checkpoint folder holds `params/` (Orbax) and `config.json` (whatever the caller wants to find
again: the shape of the model, the recipe of the run). Orbax is imported on first use, because it
takes longer than the rest of the package.
"""

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user, read_json, readable, writable

PARAMS = "params"
CONFIG = "config.json"
CHECKPOINTS = "checkpoints"  # the folder within that of a training run
MOST_NAMED = 8  # weights named per complaint; the rest are counted


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty sibling of `folder` that takes its name once the block has succeeded.

    After a failure, an interrupt included, neither of the two is there.

    Raises:
        SpecjaxError: if `folder` already holds something, or cannot be written.
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
    """The whole path of `folder`, which does not exist yet or is empty.

    Raises:
        SpecjaxError: if `folder` already holds something, or cannot be looked into.
    """
    folder = _whole_path(folder)
    with writable(folder):
        is_vacant = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_vacant:
        raise SpecjaxError(
            f"{folder} already exists and is not an empty folder; delete it or choose another name"
        )
    return folder


def _whole_path(folder: Path) -> Path:
    return Path(os.path.realpath(expand_user(folder)))


def mismatches(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> str:
    """All that is wrong with the names and shapes `found`, as one phrase; empty if they fit."""
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
    """The first names of a list, and how many more there are."""
    rest = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def save_checkpoint(folder: Path, params: Any, config: Mapping[str, Any]) -> None:
    """Writes `params` (a pytree of arrays) and `config` (any JSON) into a new `folder`, atomically.

    For one process; a run over many hosts saves through Orbax's own manager.

    Raises:
        SpecjaxError: if `folder` already holds something, or cannot be written.
    """
    import orbax.checkpoint as ocp

    text = json.dumps(config, indent=2) + "\n"
    with new_folder(folder) as unfinished:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(unfinished / PARAMS, params)
        (unfinished / CONFIG).write_text(text, encoding="utf-8")


def restore_checkpoint(folder: Path, like: Any = None) -> tuple[Any, dict[str, Any]]:
    """Reads back `(params, config)` from a folder written by `save_checkpoint`.

    Args:
        folder: the checkpoint.
        like: a pytree of arrays or `jax.ShapeDtypeStruct`s that gives structure, dtype and
            sharding; without it, nested dicts of arrays as saved, on the default device.

    Raises:
        SpecjaxError: if the folder is no checkpoint, is damaged, or does not fit `like`.
    """
    import orbax.checkpoint as ocp

    folder = _whole_path(folder)
    config = _read_config(folder)
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            saved = checkpointer.metadata(folder / PARAMS).item_metadata.tree
            complaints = "" if like is None else mismatches(_shapes(saved), _shapes(like))
            if not complaints:
                target = _on_default_device(saved) if like is None else like
                return checkpointer.restore(folder / PARAMS, target), config
        except Exception as error:  # Orbax and TensorStore raise many kinds for a damaged file
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise SpecjaxError(
                f"{folder / PARAMS} cannot be read ({reason}); save or copy the checkpoint again"
            ) from error
    raise SpecjaxError(f"{folder} does not fit this model: {complaints}; check its {CONFIG}")


def _read_config(folder: Path) -> dict[str, Any]:
    with readable(folder):
        is_checkpoint = (folder / CONFIG).is_file() and (folder / PARAMS).is_dir()
    if not is_checkpoint:
        raise SpecjaxError(
            f"{folder} is not a checkpoint: it needs {CONFIG} and {PARAMS}/; "
            "give a folder that specjax has saved"
        )
    return read_json(folder / CONFIG)


def _on_default_device(saved: Any) -> Any:
    # The device of the saving machine may not exist here.
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), saved
    )


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    # Tuples come back from disk as lists, structs as dicts: names compare without the brackets.
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape)
        for path, leaf in leaves
    }
