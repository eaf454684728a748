"""Weight-only quantisation: whole numbers with scales in place of a float weight `[O, I]`.

int8 has one scale per row, int4 one for each group of up to 32 inputs. A `QuantizedWeight` is an
ordinary pytree node, so params stay nested dicts for pure functions. Quantised are the matrices:
projections, embedding table and LM head. Norms and biases stay floats. On a CPU, XLA
unpacks int4 to bytes; native kernels do not.
"""

import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from specjax.core.errors import SpecjaxError
from specjax.core.pytree import pytree, static
from specjax.models.sharding import map_by_path, on_host

KINDS = {"int8": jnp.int8, "int4": jnp.int4}
GROUP = 32  # inputs that share an int4 scale, at most
EMBEDDING = "embed_tokens.weight"


class StoredWeight:
    """A weight `[O, I]` that params hold quantised or packed."""

    shape: tuple[int, ...]
    dtype: jnp.dtype  # in which products are computed
    kind: str | None  # of quantisation; None: floats
    signs: int | None  # `sign_checksum` of the float embedding

    def __getitem__(self, rows: Any) -> Any:
        """Returns some rows, as an array or quantised; `...` are all."""
        raise NotImplementedError


@pytree
class QuantizedWeight(StoredWeight):
    """The weight `codes * scale`: whole numbers, and one scale for each of G groups of inputs.

    Its dtype is that of the scales, in which products are computed.
    """

    codes: Array  # [..., I]; the first leaf, so Flax compares its shape with the float weight's
    scale: Array  # [..., G]
    signs: int | None = static(default=None)  # `sign_checksum` of the float embedding

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.scale.dtype

    @property
    def kind(self) -> str:
        return self.codes.dtype.name

    def __getitem__(self, rows: Any) -> "QuantizedWeight":
        return QuantizedWeight(self.codes[rows], self.scale[rows])


Weight = Float[Array, "O I"] | StoredWeight


def is_stored(leaf: Any) -> bool:
    """Whether a leaf of params is a weight in another form than an array: quantised or packed."""
    return isinstance(leaf, StoredWeight)


def check_kind(kind: str | None) -> None:
    """Raises SpecjaxError unless it is a kind of quantisation, or None."""
    if kind is not None and kind not in KINDS:
        raise SpecjaxError(f"quantize {kind!r} is not supported; use {' or '.join(KINDS)}")


@partial(jax.jit, static_argnames=("kind", "dtype"))
def quantize(weight: Float[Array, "O I"], kind: str, dtype: DTypeLike) -> QuantizedWeight:
    """Rounds a weight to whole numbers, with scales of this dtype.

    The largest weight of a group, positive or not, becomes the least number, which has no opposite.
    """
    span = jnp.iinfo(KINDS[kind])
    rows, inputs = weight.shape
    limit = inputs if kind == "int8" else GROUP
    size = next(size for size in range(min(limit, inputs), 0, -1) if inputs % size == 0)
    groups = weight.astype(jnp.float32).reshape(rows, -1, size)
    low, high = jnp.min(groups, axis=-1), jnp.max(groups, axis=-1)
    scale = (jnp.where(high > -low, high, low) / span.min).astype(dtype)
    step = jnp.where(scale != 0, scale, 1).astype(jnp.float32)[..., None]
    codes = jnp.clip(jnp.round(groups / step), span.min, span.max)
    return QuantizedWeight(codes.reshape(rows, inputs).astype(KINDS[kind]), scale)


def dequantized(weight: Any) -> Array:
    """Returns the weight as an array of its dtype; arrays stay as they are."""
    if is_stored(weight) and not isinstance(weight, QuantizedWeight):
        weight = weight[...]
    if not isinstance(weight, QuantizedWeight):
        return weight
    groups = weight.codes.reshape(*weight.scale.shape, -1).astype(weight.dtype)
    return (groups * weight.scale[..., None]).reshape(weight.shape)


def quantized_param(path: str, leaf: Array, kind: str, dtype: DTypeLike) -> Any:
    """Quantises the param at `path`, such as `layers_0.mlp.up_proj.weight`, if it is a matrix."""
    if leaf.ndim != 2:
        return leaf.astype(dtype)
    weight = quantize(leaf, kind, jnp.dtype(dtype))
    if path == EMBEDDING and not isinstance(leaf, Tracer):
        weight = replace(weight, signs=sign_checksum(leaf))
    return weight


def quantize_params(params: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Quantises the float params of a target."""
    check_kind(kind)
    return map_by_path(lambda path, leaf: quantized_param(path, leaf, kind, leaf.dtype), params)


def sign_checksum(table: Any) -> int:
    """Returns a checksum of the signs of some embeddings, before any rounding to 0."""
    if is_stored(table) and table.signs is not None:
        return table.signs
    first = table[jnp.arange(min(256, table.shape[0]))]
    corner = on_host(dequantized(first)[:, :64]).astype(np.float32)
    return zlib.crc32(np.packbits(np.signbit(corner)).tobytes())


def has_quantized(params: Any) -> bool:
    """Whether some of the params are quantised."""
    return kind_of(params) is not None


def kind_of(params: Any) -> str | None:
    """Returns how params are quantised, int8 or int4; None: not at all."""
    return next(iter(_kinds(params)), None)


def dtype_name(dtype: DTypeLike, params: Any) -> str:
    """Returns the dtype of weights and compute, such as "bfloat16" or "int8 (bfloat16)"."""
    name = jnp.dtype(dtype).name
    return next((f"{kind} ({name})" for kind in _kinds(params)), name)


def _kinds(params: Any) -> list[str]:
    leaves = filter(is_stored, jax.tree.leaves(params, is_leaf=is_stored))
    return [leaf.kind for leaf in leaves if leaf.kind]


def compute_dtype(name: str) -> str:
    """Returns the dtype of compute, given what `dtype_name` returned."""
    return name.rpartition("(")[2].rstrip(")")
