"""Products with packed weights by native kernels: a CPU's passes at the speed of its memory.

XLA rearranges every weight at every product. Here weights are packed once, while loading, and a
kernel sums each output over its inputs in one fixed order, so a row of a product has the same bits
whatever rows stand beside it. `native/kernels.h` describes the layout.
"""

import ctypes
import os
import struct
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.core.errors import SpecjaxError
from specjax.core.pytree import pytree, static
from specjax.models.quantize import QuantizedWeight, StoredWeight, Weight, is_stored, quantize
from specjax.models.sharding import map_by_path

LIBRARY = Path(__file__).parent.parent / "kernels.bin"  # no name of a Python module
VERSION = 5  # of the kernels' interface, also in native/handlers.cc
PANEL = 16  # outputs that lie side by side
SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)  # of the eight inputs in a word of int4
SWITCH = "SPECJAX_NATIVE"  # an environment variable


@cache
def _registered() -> tuple[tuple[str, ...], str]:
    """Registers the kernels; returns their instruction sets, best first, and why there are none.

    `SPECJAX_NATIVE` names the set to use, and "0" none.
    """
    if os.environ.get(SWITCH) == "0":
        return (), f"{SWITCH} is 0"
    if not LIBRARY.is_file():
        return (), "this installation was built without a C++ compiler"
    try:
        if not _is_whole(LIBRARY):
            return (), f"{LIBRARY.name} is cut short; install specjax again"
        library = ctypes.cdll.LoadLibrary(str(LIBRARY))
        if library.specjax_version() != VERSION:
            return (), "the kernels belong to another version of specjax; install it again"
        library.specjax_instructions.restype = ctypes.c_char_p
        for name in ("specjax_product", "specjax_layers", "specjax_keep"):
            handler = jax.ffi.pycapsule(getattr(library, name))
            jax.ffi.register_ffi_target(name, handler, platform="cpu")
        _process()
    except Exception as error:  # whatever another jaxlib or C library makes of it
        return (), f"the kernels cannot be loaded ({error})".splitlines()[0]
    names = tuple(library.specjax_instructions().decode().split(","))
    _number(names)
    return names, ""


def _number(names: tuple[str, ...]) -> int:
    """Returns the number of the instruction set to use."""
    wanted = os.environ.get(SWITCH)
    if wanted and wanted not in names:
        choices = f"{', '.join(names)} and, before the first load, 0"
        raise SpecjaxError(f"{SWITCH}={wanted} is not one of {choices}")
    return names.index(wanted) if wanted else 0


def _is_whole(library: Path) -> bool:
    """Whether a file of Linux has all that its header promises; loading one cut short crashes."""
    with library.open("rb") as file:
        head = file.read(64)
    if head[:4] != b"\x7fELF" or len(head) < 64:
        return True  # the loader reports what is wrong
    (start,), (size, count) = struct.unpack("<Q", head[40:48]), struct.unpack("<HH", head[58:62])
    return start + size * count <= library.stat().st_size


def instruction_sets() -> tuple[str, ...]:
    """Returns the instruction sets of this machine that there are kernels for, best first."""
    return _registered()[0]


def is_available() -> bool:
    """Whether this machine multiplies packed weights: the default device is a CPU with kernels."""
    return jax.default_backend() == "cpu" and bool(_registered()[0])


def description() -> str:
    """Returns whose products a CPU runs and why, such as "native (Avx512)"."""
    names, reason = _registered()
    if names:
        return f"native ({names[instructions()]})"
    return f"XLA's, because {reason}"


def products(params: Any) -> str:
    """Returns which products multiply by these params."""
    return description() if has_packed(params) else "XLA's"


@cache
def _process() -> int:
    return os.getpid()  # of the process that loaded the kernels


@pytree
class PackedWeight(StoredWeight):
    """A weight `[O, I]` in panels of 16 outputs; its products have no gradients.

    Its dtype is that of a float weight, or of the scales of a quantised one.
    """

    panels: Array  # [O/16, ...], as in native/kernels.h
    scales: Float[Array, "P G 16"] | None  # of G groups of inputs; None: the weight is of floats
    shape: tuple[int, ...] = static()
    dtype: jnp.dtype = static()
    signs: int | None = static(default=None)

    @property
    def kind(self) -> str | None:
        return {jnp.dtype("int8"): "int8", jnp.dtype("uint32"): "int4"}.get(self.panels.dtype)

    def __getitem__(self, rows: Any) -> Any:
        """Returns some rows of the weight, or all for `...`, in the ordinary layout."""
        rows = jnp.arange(self.shape[0])[rows]  # as JAX counts them: from the end, or up to it
        panel, lane = rows // PANEL, rows % PANEL
        panels, scales = self.panels, self.scales
        if panels.dtype == jnp.uint32:
            words = panels[panel, :, lane].view(jnp.int32)
            pairs = jnp.stack([words << (28 - shift) >> 28 for shift in SHIFTS], axis=-1)
        elif panels.dtype == jnp.int8:
            pairs = panels[panel, :, lane]
        elif panels.dtype == jnp.uint16:
            pairs = lax.bitcast_convert_type(panels[panel, :, lane], self.dtype)
        else:
            pairs = panels[panel, :, :, lane]
        codes = lax.collapse(pairs, pairs.ndim - 2)[..., : self.shape[1]]
        if scales is None:
            return codes
        codes = codes.astype(self.kind)
        return QuantizedWeight(codes, scales[panel, :, lane].astype(self.dtype), self.signs)


def packed(weight: Weight) -> Weight:
    """Packs a weight for the kernels; returns it as it is if they cannot take it."""
    if not isinstance(weight, QuantizedWeight):
        return _packed(weight)
    step = 8 if weight.kind == "int4" else 2  # inputs that lie side by side
    has_steps = weight.shape[1] % (step * weight.scale.shape[1]) == 0
    return _packed(weight) if has_steps else weight


@jax.jit
def _packed(weight: Any) -> PackedWeight:
    codes, scales, signs = weight, None, None
    if isinstance(weight, QuantizedWeight):
        codes, signs = weight.codes, weight.signs
        scale = jnp.pad(weight.scale, ((0, -codes.shape[0] % PANEL), (0, 0)))
        scales = scale.reshape(-1, PANEL, scale.shape[1]).swapaxes(1, 2)
    pairs = jnp.pad(
        codes.astype(jnp.int8) if codes.dtype == jnp.int4 else codes,
        ((0, -codes.shape[0] % PANEL), (0, codes.shape[1] % 2)),
    )
    pairs = pairs.reshape(-1, PANEL, pairs.shape[1] // 2, 2).swapaxes(1, 2)
    if codes.dtype == jnp.int4:
        bits = (pairs.view(jnp.uint8) & 15).astype(jnp.uint32)
        eight = bits.reshape(len(bits), -1, 4, PANEL, 2).swapaxes(2, 3).reshape(-1, 8)
        words = sum(eight[:, place] << shift for place, shift in enumerate(SHIFTS))
        pairs = jnp.asarray(words).reshape(len(bits), -1, PANEL)
    elif codes.dtype.itemsize == 4:
        pairs = pairs.swapaxes(2, 3)
    elif codes.dtype.itemsize == 2:  # as bits, since XLA would convert a whole table to float32
        pairs = lax.bitcast_convert_type(pairs, jnp.uint16)
    return PackedWeight(pairs, scales, codes.shape, jnp.dtype(weight.dtype), signs)


def pack_params(params: Any, kind: str | None = None) -> Any:
    """Packs the matrices of some params in turn, float ones as `kind` if it is given."""
    return map_by_path(partial(packed_param, kind=kind), params, is_leaf=is_stored)


def packed_param(path: str, leaf: Any, kind: str | None = None) -> Any:
    """Packs the param at `path`, such as `layers_0.mlp.up_proj.weight`, if it is a matrix."""
    is_matrix = path.endswith("weight") and len(leaf.shape) == 2
    if not is_matrix or isinstance(leaf, PackedWeight):
        return leaf
    if kind is not None and not is_stored(leaf):
        leaf = quantize(leaf, kind, leaf.dtype)
    return jax.block_until_ready(packed(leaf))


def has_packed(params: Any) -> bool:
    """Whether some of the params are packed."""
    leaves = jax.tree.leaves(params, is_leaf=is_stored)
    return any(isinstance(leaf, PackedWeight) for leaf in leaves)


def has_native_layers(params: Any, head_dim: int) -> bool:
    """Whether one native call runs all layers, so that tokens do not depend on their neighbours."""
    stored = [leaf for leaf in jax.tree.leaves(params, is_leaf=is_stored) if is_stored(leaf)]
    return fit_one_call(stored) and head_dim % PANEL == 0


def fit_one_call(weights: Sequence[Any]) -> bool:
    """Whether one native call multiplies by all weights: packed, of one dtype, quantised or not."""
    are_packed = all(isinstance(weight, PackedWeight) for weight in weights)
    return are_packed and len({(weight.kind is None, weight.dtype) for weight in weights}) == 1


def unpack_params(params: Any) -> Any:
    """Returns params for training, meshes and files: none of them is packed."""

    def unpack(leaf):
        return _unpacked(leaf) if isinstance(leaf, PackedWeight) else leaf

    return jax.tree.map(unpack, params, is_leaf=is_stored)


@jax.jit
def _unpacked(weight: PackedWeight) -> Weight:
    return weight[...]


def without_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Has a function of packed weights raise SpecjaxError where it is differentiated."""
    function = jax.custom_jvp(function)

    @function.defjvp
    def raise_error(primals: Any, tangents: Any) -> Any:
        raise SpecjaxError(
            "packed weights have no gradients; train with the params of `load(..., packed=False)`"
        )

    return function


def operands(weight: PackedWeight) -> list[Array]:
    """Returns the arrays that the kernels take for a weight."""
    return [weight.panels] if weight.scales is None else [weight.panels, weight.scales]


def instructions() -> np.int32:
    """Returns the number of the instruction set to use; an argument of all kernels."""
    names = _registered()[0]
    if names and os.getpid() != _process():  # JAX would wait for threads that are not there
        raise SpecjaxError("this process was forked from one that uses JAX; start it by `spawn`")
    return np.int32(_number(names))


@without_gradients
def packed_product(
    rows: Float[Array, "R I"], weight: PackedWeight, count: Int[Array, ""] | None = None
) -> Float[Array, "R O"]:
    """Returns `rows @ weight.T` in float32; 0 for rows from `count` on, if it is given."""
    num_outputs = weight.panels.shape[0] * PANEL
    sums = jax.ShapeDtypeStruct((rows.shape[0], num_outputs), jnp.float32)
    call = jax.ffi.ffi_call("specjax_product", sums, vmap_method="sequential")
    count = jnp.asarray(len(rows) if count is None else count, jnp.int32)
    result = call(rows, count, *operands(weight), instructions=instructions())
    return result[:, : weight.shape[0]]


def keep_slots(
    caches: Sequence[Float[Array, "B K S D"]],
    path: Int[Array, "B P"],
    length: Int[Array, " B"],
    count: Int[Array, " B"],
) -> list[Array]:
    """Moves slot `length + path[b, i]` of each cache to slot `length + i`, for i < `count[b]`.

    It copies nothing else; XLA's scatter converts a whole cache of 16 bits to float32 and back.
    Paths must ascend.
    """
    like = [jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in caches]
    in_place = {3 + number: number for number in range(len(caches))}
    options = {"vmap_method": "sequential", "input_output_aliases": in_place}
    call = jax.ffi.ffi_call("specjax_keep", like, **options)
    numbers = (values.astype(jnp.int32) for values in (path, length, count))
    return list(call(*numbers, *caches))
