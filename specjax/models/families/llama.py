"""Llama 1 to 3, Vicuna, TinyLlama, and other models with their architecture."""

from collections.abc import Mapping
from typing import Any

from specjax.core.errors import SpecjaxError
from specjax.models.config import (
    Rope,
    TransformerConfig,
    declared_fields,
    eos_tokens,
    whole_number,
)

MODEL_TYPE = "llama"
ARCHITECTURE = "LlamaForCausalLM"
DEFAULTS = {"max_position_embeddings": 2048}  # of transformers, for absent keys
NAMES = (  # our path of a weight, Hugging Face's name; {} is the layer
    ("embed_tokens.", "model.embed_tokens."),
    ("layers_{}.", "model.layers.{}."),
    ("norm.", "model.norm."),
    ("lm_head.", "lm_head."),
)


def read(values: Mapping[str, Any]) -> TransformerConfig:
    """Reads the content of a `config.json`, completed with `DEFAULTS`.

    Raises:
        SpecjaxError: if the activation or RoPE type is not supported, or a field is malformed.
        KeyError: if a field is missing.
    """
    if values.get("hidden_act", "silu") != "silu":
        raise SpecjaxError(
            f"hidden_act {values['hidden_act']!r} is not supported; Llama models use 'silu'"
        )
    heads = values["num_attention_heads"]
    found = {
        "vocab_size": values["vocab_size"],
        "hidden_size": values["hidden_size"],
        "intermediate_size": values["intermediate_size"],
        "num_hidden_layers": values["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": values.get("num_key_value_heads") or heads,
        "head_dim": values.get("head_dim") or _head_dim(values["hidden_size"], heads),
        "max_position_embeddings": values["max_position_embeddings"],
        "rms_norm_eps": values.get("rms_norm_eps", 1e-6),
        "tie_word_embeddings": values.get("tie_word_embeddings") or False,
        "attention_bias": values.get("attention_bias") or False,
        "mlp_bias": values.get("mlp_bias") or False,
        "rope": Rope.from_huggingface(values),
        "model_type": MODEL_TYPE,
        "bos_token_id": values.get("bos_token_id"),
        "eos_token_id": eos_tokens(values),
    }
    return TransformerConfig(**declared_fields(TransformerConfig, found))


def _head_dim(hidden_size: Any, heads: Any) -> int:
    return whole_number("hidden_size", hidden_size) // whole_number("num_attention_heads", heads)
