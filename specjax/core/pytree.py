"""The struct decorator: frozen dataclasses that JAX transformations understand.

Unflattening skips `__init__`: inside `vmap`, `scan` and `eval_shape` JAX rebuilds structures with
placeholders instead of arrays, which a shape check in `__init__` would reject.
"""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

_Class = TypeVar("_Class", bound=type)


def static(**options: Any) -> Any:
    """Declares a field that is part of the structure: hashable, compared by value, never traced."""
    return dataclasses.field(metadata={"static": True}, **options)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, static))
def pytree(cls: _Class) -> _Class:
    """Makes `cls` a frozen dataclass and registers it as a JAX pytree node."""
    cls = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(cls)
    arrays = tuple(field.name for field in fields if not field.metadata.get("static"))
    settings = tuple(field.name for field in fields if field.metadata.get("static"))

    def flatten(node):
        children = [getattr(node, name) for name in arrays]
        return children, tuple(getattr(node, name) for name in settings)

    def flatten_with_keys(node):
        children, structure = flatten(node)
        return list(zip(map(jax.tree_util.GetAttrKey, arrays), children, strict=True)), structure

    def unflatten(structure, children):
        node = object.__new__(cls)
        for name, value in zip((*arrays, *settings), (*children, *structure), strict=True):
            object.__setattr__(node, name, value)
        return node

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


def cast_floats(tree: Any, dtype: DTypeLike) -> Any:
    """Casts the floats among the leaves of a tree; whole numbers stay as they are."""

    def cast(leaf):
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, tree)
