"""What the files of several kinds of heads have in common.

Of all kinds that is a config that says whose head it is, and how they are written. Those of Medusa
and Hydra repeat one block within a head, of which their files hold a copy for each time.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jax.typing import DTypeLike

from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user, read_json, readable
from specjax.models.config import CHECK, TransformerConfig
from specjax.models.io.checkpoint import CONFIG, mismatches
from specjax.models.io.huggingface import check_weights, read_params, write_weights
from specjax.models.io.weights import StoredTensor

ABOUT = "specjax"  # the key of config.json for what other loaders do not ask
WEIGHTS = "model.safetensors"  # where other loaders look first
HEAD = "head"  # the folder of the head within that of its training run


# ---- The config --------------------------------------------------------------------------------


def read_values(folder: Path, kind: str = "") -> dict[str, Any]:
    """The `config.json` of a head.

    Args:
        folder: of the head.
        kind: of head that is wanted, such as "an EAGLE head", for the message.

    Raises:
        SpecjaxError: if it is missing or damaged.
    """
    path = expand_user(folder) / CONFIG
    with readable(path):
        exists = path.is_file()
    if not exists:
        wanted = kind or "a drafter head"
        raise SpecjaxError(f"{folder} holds no {CONFIG}; give the folder of {wanted}")
    return read_json(path)


def read_about(folder: Path) -> dict[str, Any]:
    """What the head was saved with as `about`; {} for a head of others.

    Raises:
        SpecjaxError: if the config is missing or damaged.
    """
    about = read_values(folder).get(ABOUT, {})
    if not isinstance(about, dict):
        raise SpecjaxError(f"{folder / CONFIG}: {ABOUT} {about!r} is not an object; {CHECK}")
    return about


def check_owner(folder: Path, target: str) -> None:
    """Raises SpecjaxError if the head says (`about["target"]`) that it is of another target.

    Args:
        folder: of the head.
        target: fingerprint of the target that it is to draft for.
    """
    owner = read_about(folder).get("target", target)
    if owner != target:
        raise SpecjaxError(
            f"{folder}: this head was trained for target {owner}, but this one is {target}; "
            "give a head of this target, or train one"
        )


def check_sizes(place: str, hidden_size: int, vocab_size: int, target: TransformerConfig) -> None:
    """Raises SpecjaxError, which begins with `place`, if the head is of a target of other sizes."""
    for title, ours, theirs in (
        ("hidden size", hidden_size, target.hidden_size),
        ("vocabulary", vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            raise SpecjaxError(
                f"{place}: the head is for a target of {title} {ours}, but this one has {theirs}; "
                "give a head that was trained for this target"
            )


# ---- Saving ------------------------------------------------------------------------------------


def check_layout(layout: str, layouts: Sequence[str], because: str = "") -> None:
    """Raises SpecjaxError, which ends in `because`, if a head is not written in this layout."""
    if layout not in layouts:
        raise SpecjaxError(f"layout {layout!r} is unknown; choose {', '.join(layouts)}{because}")


def write_head(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Any],
    dtype: DTypeLike,
    about: Mapping[str, Any] | None,
    file: str = WEIGHTS,
) -> None:
    """As `write_weights`, with `about` in the config for `read_about`.

    Raises:
        SpecjaxError: as `write_weights`.
    """
    told = {ABOUT: dict(about)} if about else {}
    write_weights(folder, {**config, **told}, tensors, dtype, file)


# ---- The tensors -------------------------------------------------------------------------------


def zeros(name: str, shape: tuple[int, ...]) -> StoredTensor:
    """A tensor that a file leaves out because it is zero."""
    return StoredTensor(name, shape, "F32", lambda: np.zeros(shape, np.float32))


def read_repeated(
    folder: Path,
    head: Any,
    stored: Mapping[str, StoredTensor],
    paths: Mapping[str, str],
    repeated: str,
    dtype: DTypeLike,
    progress: bool,
) -> dict[str, Any]:
    """The params of `head`, of which files hold some more than once.

    Args:
        folder: of the head, for messages.
        head: the module.
        stored: its tensors, by name.
        paths: the path in its params of each name; copies have the same.
        repeated: what the copies are, such as "the layers of a Medusa head", for the message.
        dtype: of the params, whatever the files store.
        progress: show a bar on stderr, if that is a terminal.

    Raises:
        SpecjaxError: if the tensors are not those of the head, or quantised, or copies differ.
    """
    shapes = param_shapes(head)
    check_weights(folder, stored, {name: shapes[path] for name, path in paths.items()})
    wanted: dict[str, StoredTensor] = {}
    for name, path in paths.items():
        tensor = wanted.setdefault(path, stored[name])
        if tensor is not stored[name] and not np.array_equal(tensor.read(), stored[name].read()):
            raise SpecjaxError(
                f"{folder}: {name} is not equal to {tensor.name}, but {repeated} are one block, "
                "repeated; others are not supported"
            )
    return read_params(wanted, dtype, f"Loading {folder.name}", progress)


def leaves_to_save(folder: Path, head: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of the params by their paths, such as `blocks_0.weight`.

    Raises:
        SpecjaxError: if they are not those of the head; the message names `folder`.
    """
    leaves = _leaves(params)
    found = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
    if complaints := mismatches(found, param_shapes(head)):
        raise SpecjaxError(f"cannot save {folder}: {complaints}; give the heads of these params")
    return leaves


def param_shapes(head: Any) -> dict[str, tuple[int, ...]]:
    """The shape of each leaf of a head's params, by its path."""
    params = jax.eval_shape(head.initialise, jax.random.key(0))
    return {path: leaf.shape for path, leaf in _leaves(params).items()}


def _leaves(params: Mapping[str, Any]) -> dict[str, Any]:
    return dict(flatten_dict(params, sep="."))
