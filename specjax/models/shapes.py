"""Compares params with the names and shapes that a module expects."""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import jax

from specjax.core.compilation import with_default_types
from specjax.models.quantize import is_stored

MAX_NAMED = 8  # names in an error; the rest are counted


def shape_mismatches(params: Any, module: Any) -> str:
    """Returns how `params` differ from those of `module.initialise`; empty if they fit."""
    return mismatches(shapes_of(params), expected_shapes(module))


@cache
def expected_shapes(module: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each param of `module` by its path.

    A module whose layers have the same shapes has a `with_one_layer`, which alone is traced.
    """
    layers = getattr(module, "with_one_layer", lambda: (module, 1))
    traced, num_layers = layers()
    initialise = with_default_types(partial(jax.eval_shape, traced.initialise))
    shapes = shapes_of(initialise(jax.random.key(0)))
    first = {name: shape for name, shape in shapes.items() if name.startswith("layers_0.")}
    if not num_layers:
        shapes = {name: shape for name, shape in shapes.items() if name not in first}
    for layer in range(1, num_layers):
        shapes |= {name.replace("_0", f"_{layer}", 1): shape for name, shape in first.items()}
    return dict(sorted(shapes.items(), key=lambda item: item[0].split(".")))


def mismatches(
    actual: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> str:
    """Returns how the names and shapes `actual` differ from `expected`; empty if they agree."""
    misshapen = [
        f"{name} is {actual[name]}, expected {shape}"
        for name, shape in expected.items()
        if name in actual and actual[name] != shape
    ]
    groups = {
        "missing": [name for name in expected if name not in actual],
        "wrong shape": misshapen,
        "unexpected": [name for name in actual if name not in expected],
    }
    return "; ".join(f"{title}: {first_few(names)}" for title, names in groups.items() if names)


def first_few(names: list[str]) -> str:
    """Joins the first names of a list, and says how many more there are."""
    rest = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def shapes_of(params: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each leaf by its path, such as `layers_0.norm.weight`."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_stored)
    name = partial(jax.tree_util.keystr, simple=True, separator=".")
    return {name(path): tuple(getattr(leaf, "shape", ())) for path, leaf in leaves}
