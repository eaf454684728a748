"""Compares params with the names and shapes that a module expects."""

from functools import cache
from typing import Any

import jax

from specjax.models.io.checkpoint import mismatches, shapes_of


def shape_mismatches(params: Any, module: Any) -> str:
    """Returns how `params` differ from those of `module`, as one phrase; empty if they fit.

    Args:
        params: any pytree.
        module: its `initialise(key)` returns the params it expects.
    """
    return mismatches(shapes_of(params), expected_shapes(module))


@cache
def expected_shapes(module: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each param of `module` by its path."""
    return shapes_of(jax.eval_shape(module.initialise, jax.random.key(0)))
