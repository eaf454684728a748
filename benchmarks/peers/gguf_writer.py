"""Writes Llama models as GGUF files of floats, as llama.cpp reads them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.typing import DTypeLike

from specjax import SpecjaxError, Transformer, TransformerConfig
from specjax.core.pytree import cast_floats
from specjax.models.config import Variant
from specjax.models.families import config_values, llama
from specjax.models.io.gguf import NO_TOKENIZER
from specjax.models.io.gguf_architectures import FIELDS, ROPE_DIVISORS, rope_divisors
from specjax.models.io.huggingface import huggingface_name
from specjax.models.native import unpack_params
from specjax.models.quantize import has_quantized
from specjax.models.shapes import shape_mismatches
from specjax.models.sharding import on_host

KINDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # as GGUF calls them
Q8_0 = "Q8_0"  # int8 with a scale for each 32 inputs
ROPE_TYPES = ("default", "linear", "llama3")  # those that llama.cpp has too


def check_writable_as_gguf(config: TransformerConfig, params: Mapping[str, Any]) -> None:
    """Raises SpecjaxError unless this is a Llama model of floats with a RoPE that llama.cpp has."""
    if config.model_type != llama.MODEL_TYPE:
        raise SpecjaxError(f"only Llama models are written as GGUF, not {config.model_type!r}")
    usual = vars(Variant())
    other = [
        f"{name} {value!r}" for name, value in vars(config.variant).items() if value != usual[name]
    ]
    if other:
        raise SpecjaxError(f"llama.cpp has no Llama with {', '.join(other)}")
    if config.rope.rope_type not in ROPE_TYPES:
        raise SpecjaxError(f"llama.cpp has no RoPE of type {config.rope.rope_type!r}")
    if has_quantized(params):
        raise SpecjaxError("quantised params are not written as GGUF; load them as floats")


def save_gguf(
    path: Path, config: TransformerConfig, params: Mapping[str, Any], dtype: DTypeLike
) -> None:
    """Writes a Llama model without its tokenizer: vectors in float32, matrices in `dtype`.

    With `dtype` Q8_0, matrices whose width is not a multiple of 32 remain float32.
    """
    from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map

    check_writable_as_gguf(config, params)
    if wrong := shape_mismatches(params, Transformer(config)):
        raise SpecjaxError(f"cannot save {path}: {wrong}; give the config of these params")
    writer = GGUFWriter(path, llama.MODEL_TYPE)
    _add_config(writer, config)
    table = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for at, leaf in cast(Any, flatten_dict(unpack_params(params), sep=".")).items():
        name = cast(str, table.get_name(huggingface_name(at), (".weight", ".bias")))
        held = jnp.float32 if leaf.ndim == 1 or dtype == Q8_0 else dtype
        is_quantised = dtype == Q8_0 and leaf.ndim > 1 and leaf.shape[-1] % 32 == 0
        values = np.asarray(cast_floats(on_host(leaf), held))
        kind = Q8_0 if is_quantised else KINDS[values.dtype.name]
        _add_tensor(writer, name, _in_pairs(values, heads.get(at.split(".")[-2], 0)), kind)
    if config.rope.rope_type == "llama3":
        _add_tensor(writer, ROPE_DIVISORS, rope_divisors(config.rope, config.head_dim), "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_config(writer: Any, config: TransformerConfig) -> None:
    values = config_values(config)
    for theirs, ours in FIELDS.items():
        if (value := values.get(ours)) is not None:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"llama.{theirs}", value)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    if config.rope.rope_type == "linear":
        writer.add_string("llama.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(config.rope.factor)
    if config.rope.rope_type == "llama3":
        writer.add_rope_scaling_orig_ctx_len(config.rope.original_max_position_embeddings)
    writer.add_tokenizer_model(NO_TOKENIZER)


def _add_tensor(writer: Any, name: str, values: np.ndarray, kind: str) -> None:
    from gguf import GGMLQuantizationType, quants

    raw = GGMLQuantizationType[kind]
    values = quants.quantize(values, raw) if kind == Q8_0 else np.ascontiguousarray(values)
    writer.add_tensor(name, values.view(np.uint8), raw_dtype=raw)


def _in_pairs(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Puts the two rows of each rotary pair side by side, the reverse of `PackedTensor.read`."""
    if not num_heads:
        return values
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
