"""Compares params with the names and shapes that a module expects."""

from functools import cache, partial
from typing import Any

import jax

from specjax.models.io.checkpoint import mismatches


def shape_mismatches(params: Any, module: Any) -> str:
    """Returns how `params` differ from those of `module`, as one phrase; empty if they fit.

    Args:
        params: any pytree.
        module: its `initialise(key)` returns the params it expects.
    """
    return mismatches(shapes_of(params), expected_shapes(module))


@cache
def expected_shapes(module: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each param of `module` by its path, such as `layers_0.norm.weight`."""
    return shapes_of(jax.eval_shape(module.initialise, jax.random.key(0)))


def shapes_of(params: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each leaf by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    name = partial(jax.tree_util.keystr, simple=True, separator=".")
    return {name(path): tuple(jax.numpy.shape(leaf)) for path, leaf in leaves}
