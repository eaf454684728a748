"""Meshes of devices, and the rules by which arrays are split over them.

A mesh has the axes `data`, for the rows of a batch, and `model`, for attention heads, feed-forward
and vocabulary. The XLA compiler derives the rest of a program, collectives included, from where
params, rows and caches lie.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specjax.core.errors import SpecjaxError

DATA, MODEL = "data", "model"
# Params of the targets of all families and of the heads of all methods, with the axis that lies
# along `model` and whether that axis is one of attention heads. Of two products in a row the first
# is split by its outputs, the second by its inputs.
RULES = (
    (r"[qkv]_proj\.(weight|bias)", 0, True),
    (r"o_proj\.weight", 1, True),
    (r"(gate|up)_proj\.(weight|bias)", 0, False),
    (r"down_proj\.weight", 1, False),
    (r"(embed_tokens|lm_head|lm_heads_\d+)\.(weight|bias)", 0, False),
    (r"(fc|blocks_\d+|later_blocks_\d+|linear|res_connection)\.(weight|bias)", 0, False),
)


def make_mesh(axes: str, devices: Sequence[Any] | None = None) -> Mesh:
    """Returns the mesh that a text such as "data=2,model=4" describes; an absent axis is 1.

    It takes the first of `devices`, by default all; a run of several processes needs them all.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {DATA: 1, MODEL: 1}
    for part in axes.split(","):
        name, _, size = part.strip().partition("=")
        if name not in sizes or not size.isdecimal() or int(size) < 1:
            raise SpecjaxError(f"mesh {axes!r} is not of the form data=2,model=4")
        sizes[name] = int(size)
    count = math.prod(sizes.values())
    if count > len(devices) or (jax.process_count() > 1 and count < len(devices)):
        raise SpecjaxError(
            f"mesh {axes!r} needs {count} device(s), but this run has {len(devices)}; data times "
            "model must be that number, or less in a run of one process"
        )
    kinds = (AxisType.Auto,) * 2
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices[:count]
    )


def as_mesh(mesh: Mesh | str) -> Mesh:
    """Returns a mesh with the axes `data` and `model`, over which XLA spreads the arithmetic."""
    if isinstance(mesh, str):
        return make_mesh(mesh)
    if set(mesh.axis_names) != {DATA, MODEL}:
        raise SpecjaxError(f"the mesh has the axes {mesh.axis_names}; name them data and model")
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * 2)


def check_batch(mesh: Mesh | None, num_rows: int, what: str) -> None:
    """Raises SpecjaxError unless rows spread evenly over `data`."""
    if mesh is not None and num_rows % mesh.shape[DATA]:
        raise SpecjaxError(
            f"{what} {num_rows} does not spread evenly over data={mesh.shape[DATA]} of the mesh; "
            "take a multiple of that"
        )


@dataclass(frozen=True)
class Placement:
    """The devices of params, or of an optimizer's state of them.

    Attributes:
        mesh: the devices.
        head_dim: the width of an attention head, which is never split.
        fsdp: matrices are split over `data` as well, and gathered where they are read.
    """

    mesh: Mesh
    head_dim: int
    fsdp: bool = False

    def of(self, path: str, shape: tuple[int, ...]) -> NamedSharding:
        """Returns where the param at a path such as `layers_0.mlp.up_proj.weight` lies.

        An axis that does not divide evenly is not split: every device has all of it, such as heads
        that are fewer than the devices.
        """
        spec: list[str | None] = [None] * len(shape)
        for pattern, axis, is_of_heads in RULES:
            if axis < len(shape) and re.search(rf"(^|\.){pattern}(\.\w+)?$", path):
                width = self.head_dim if is_of_heads and not path.endswith(".scale") else 1
                if shape[axis] % (width * self.mesh.shape[MODEL]) == 0:
                    spec[axis] = MODEL
                other = 1 - axis
                if self.fsdp and len(shape) == 2 and shape[other] % self.mesh.shape[DATA] == 0:
                    spec[other] = DATA
        return NamedSharding(self.mesh, P(*spec))


def place(tree: Any, placement: Placement | None) -> Any:
    """Moves params, or an optimizer's state of them, to their devices; shapes learn theirs."""
    if placement is None:
        return tree
    return map_by_path(lambda path, leaf: put_array(leaf, placement.of(path, leaf.shape)), tree)


def map_by_path(function: Callable[[str, Any], Any], tree: Any, is_leaf: Any = None) -> Any:
    """Maps the path, such as `layers_0.mlp.up_proj.weight`, and the value of each leaf."""

    def mapped(path, leaf):
        return function(jax.tree_util.keystr(path, simple=True, separator="."), leaf)

    return jax.tree_util.tree_map_with_path(mapped, tree, is_leaf=is_leaf)


def put_array(leaf: Any, sharding: NamedSharding) -> Any:
    """Moves one array, which all processes have, to its devices."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(sharding=sharding)
    if sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.jit(lambda leaf: leaf, out_shardings=sharding)(leaf)
    local = np.asarray(leaf)
    return jax.make_array_from_callback(local.shape, sharding, local.__getitem__)


def shard_batch(tree: Any, mesh: Mesh | None, batch: int) -> Any:
    """Has the arrays of a batch within a compiled program lie along `data`.

    The heads of cached keys and values lie along `model`. Arrays without rows stay where they are.
    A single row is on all devices of `data`. Shapes learn where they would lie.
    """
    if mesh is None:
        return tree

    def constrain(path, leaf):
        if leaf.ndim == 0 or leaf.shape[0] != batch:
            return leaf
        rows = DATA if batch % mesh.shape[DATA] == 0 else None
        is_cached = re.search(r"\.(keys|values)\[\d+\]$", jax.tree_util.keystr(path))
        is_split = is_cached and leaf.shape[1] % mesh.shape[MODEL] == 0
        sharding = NamedSharding(mesh, P(rows, MODEL) if is_split else P(rows))
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return put_array(leaf, sharding)
        return lax.with_sharding_constraint(leaf, sharding)

    return jax.tree_util.tree_map_with_path(constrain, tree)


def everywhere(tree: Any, mesh: Mesh | None) -> Any:
    """Has arrays of a compiled program lie whole on every device."""
    if mesh is None:
        return tree
    return lax.with_sharding_constraint(tree, NamedSharding(mesh, P()))


def on_host(leaf: Any) -> np.ndarray:
    """Returns the whole array as numpy's, wherever its parts are; all processes call it."""
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        mesh = leaf.sharding.mesh  # pyright: ignore[reportAttributeAccessIssue]
        leaf = put_array(leaf, NamedSharding(mesh, P()))
    return np.asarray(leaf)
