"""A stack of decoder layers over a cache: one native call if the weights are packed, else by layer.

The native call computes all layers of a pass at once. Each token's sums have one fixed order, so
its bits depend neither on the number of tokens nor on where the slots that it sees lie.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from specjax.models.cache import KVCache, write_slots
from specjax.models.layers import ACTIVATIONS, NORMS, DecoderLayer, rotation_of
from specjax.models.native import PANEL, fit_one_call, instructions, operands, without_gradients
from specjax.models.target import QueryRows, Taps

NORM_FIELDS = (
    "input_layernorm",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "attention_output_norm",
    "post_attention_layernorm",
    "mlp_output_norm",
)
LINEAR_FIELDS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
Head = tuple[int, int]  # layer and head
Results = tuple[dict[int, Float[Array, "B Q D"]], dict[Head, Float[Array, "B Q S"]], KVCache]


def run_layers(
    layers: Sequence[DecoderLayer],
    x: Float[Array, "B Q E"],
    rows: QueryRows,
    cache: KVCache,
    taps: Taps = Taps(),
    norm: nn.Module | None = None,
    in_any_order: bool = False,
) -> Results:
    """Runs `x` through layers; writes their keys and values as scratch.

    Returns the tapped hidden states and the last by number (0: `x`, n: the output of layer n, the
    last after `norm`), the attention of the tapped heads, and the cache. `in_any_order` as for
    `attention.attend`.
    """
    config = layers[0].config
    start = cache.length + (rows.visible.shape[2] - rows.tokens.shape[1])
    positions = write_slots(cache.positions, rows.positions, start, axis=1)
    cache = replace(cache, positions=positions)
    rotate = partial(rotation_of, rows.positions, config, cache.prompt_length)
    rotations: dict[Any, Any] = {None: None} | {rope: rotate(rope) for rope in _ropes(layers)}
    if _is_native(layers, x):
        return _run_natively(layers, x, rows, cache, rotations, taps, norm)
    visible = cache.visible_slots(rows.visible)
    distance = rows.positions[:, :, None] - cache.positions[:, None, :]
    windows = {config.window_of(number) for number in range(len(layers))}
    masks = {  # the slots that each token sees
        window: visible if window is None else visible & (distance < window) for window in windows
    }
    hidden, attention, keys, values = {0: x}, dict[Head, Any](), [], []
    for number, layer in enumerate(layers):
        x, weights, layer_keys, layer_values = cast(Any, layer)(
            x,
            rotations[config.rope_of(number)],
            cache.keys[number],
            cache.values[number],
            start,
            masks[config.window_of(number)],
            is_prefill=not (taps.logits or taps.attention_heads),
            in_any_order=in_any_order,
        )
        hidden[number + 1] = x
        attention |= {at: weights[:, at[1]] for at in taps.attention_heads if at[0] == number}
        keys.append(layer_keys)
        values.append(layer_values)
    if norm is not None:
        hidden[len(layers)] = norm(x)
    return hidden, attention, replace(cache, keys=tuple(keys), values=tuple(values))


def _is_native(layers: Sequence[DecoderLayer], x: Array) -> bool:
    """Whether one native call can run the layers."""
    variables = [layer.variables.get("params") for layer in layers]
    if not all(variables) or layers[0].config.head_dim % PANEL:
        return False
    linears = [_param(params, field) for params in variables for field in LINEAR_FIELDS]
    weights = [linear["weight"] for linear in linears if linear]
    return fit_one_call(weights) and weights[0].dtype == x.dtype


def _ropes(layers: Sequence[DecoderLayer]) -> list[Any]:
    """Returns the different rotary embeddings of the layers."""
    ropes = dict.fromkeys(layers[0].config.rope_of(layer) for layer in range(len(layers)))
    return [rope for rope in ropes if rope is not None]


def _param(params: Any, path: str) -> Any:
    for name in path.split("."):
        params = params.get(name, {})
    return params


def _run_natively(
    layers: Sequence[DecoderLayer],
    x: Array,
    rows: QueryRows,
    cache: KVCache,
    rotations: dict[Any, Any],
    taps: Taps,
    norm: nn.Module | None,
) -> Results:
    config, count = layers[0].config, len(layers)
    variant, ropes = config.variant, _ropes(layers)
    windows = list(dict.fromkeys(config.window_of(layer) for layer in range(count)))
    inner = sorted({layer % (count + 1) for layer in taps.hidden_layers} - {0, count})
    heads = sorted(set(taps.attention_heads))
    hidden, normed = {0: x}, x
    variables = [dict(layer.variables["params"]) for layer in layers]
    if not layers[0].is_plainly_normed:
        normed, x = layers[0].normed(x), layers[0].residual(x)
        del variables[0]["input_layernorm"]
    computed = jnp.asarray(x.shape[1] if rows.count is None else rows.count, jnp.int32)
    inputs = [x, normed, rows.positions, cache.positions, cache.length, computed, rows.visible]
    inputs += [angle for rope in ropes for angle in rotations[rope]]
    inputs += [] if norm is None else _vectors(norm.variables["params"])[1]
    fields, in_place = [], {}
    for number, params in enumerate(variables):
        present, arrays = _layer_operands(params)
        fields.append(present)
        inputs += arrays
        for cached in (cache.keys[number], cache.values[number]):
            in_place[len(inputs)] = 3 + len(in_place)
            inputs.append(cached)
    batch, queries, width = x.shape
    like = jax.ShapeDtypeStruct
    results = [
        like(x.shape, x.dtype),
        like((len(inner), batch, queries, width), x.dtype),
        like((len(heads), batch, queries, cache.num_slots), jnp.float32),
        *(like(inputs[at].shape, inputs[at].dtype) for at in in_place),
    ]
    rotated = rotations[ropes[0]][0].shape[-1] if ropes else 0
    sizes = [config.num_attention_heads, config.num_key_value_heads, config.head_dim]
    numbers = [list(NORMS).index(variant.norm), list(ACTIVATIONS).index(variant.hidden_act)]
    scale = (variant.query_pre_attn_scalar or config.head_dim) ** -0.5
    factors = [config.rms_norm_eps, scale, variant.attn_logit_softcapping or 0]
    rope_numbers = {rope: number for number, rope in enumerate(ropes)} | {None: -1}
    as_integers = partial(np.array, dtype=np.int32)
    options = {"vmap_method": "sequential", "input_output_aliases": in_place}
    call = partial(
        jax.ffi.ffi_call("specjax_layers", results, **options),
        instructions=instructions(),
        sizes=as_integers([*sizes, config.intermediate_size, rotated]),
        numbers=as_integers([*numbers, len(ropes), norm is not None]),
        factors=np.array(factors, np.float32),
        fields=np.array(fields, np.int64),
        layer_windows=as_integers([windows.index(config.window_of(n)) for n in range(count)]),
        layer_ropes=as_integers([rope_numbers[config.rope_of(n)] for n in range(count)]),
        windows=as_integers([window or 0 for window in windows]),
        tapped_layers=as_integers([layer - 1 for layer in inner]),
        tapped_heads=as_integers(heads).reshape(-1),
    )
    output, tapped, attention, *caches = without_gradients(call)(*inputs)
    hidden |= dict(zip(inner, tapped, strict=True)) | {count: output}
    cache = replace(cache, keys=tuple(caches[::2]), values=tuple(caches[1::2]))
    return hidden, dict(zip(heads, attention, strict=True)), cache


def _vectors(params: Any) -> tuple[list[bool], list[Array]]:
    """Returns which of weight and bias a norm has, and these."""
    present = ["weight" in params, "bias" in params]
    return present, [params[name] for name in ("weight", "bias") if name in params]


def _layer_operands(params: Any) -> tuple[int, list[Array]]:
    """Returns the params of a layer in the order of the kernel, and bits that say which it has."""
    present, arrays = [], []
    for path in NORM_FIELDS:
        has, leaves = _vectors(_param(params, path))
        present += has
        arrays += leaves
    for path in LINEAR_FIELDS:
        linear = _param(params, path)
        leaves = operands(linear["weight"]) if linear else []
        present += [len(leaves) > 0, len(leaves) > 1, "bias" in linear]
        arrays += leaves + ([linear["bias"]] if "bias" in linear else [])
    return sum(bit << number for number, bit in enumerate(present)), arrays
