"""Mistral: a Llama whose layers may attend to a sliding window only."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specjax.models.config import TransformerConfig, declared_fields
from specjax.models.families import llama

MODEL_TYPE = "mistral"
ARCHITECTURE = "MistralForCausalLM"
DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
NAMES = llama.NAMES


def read(values: Mapping[str, Any]) -> TransformerConfig:
    """Reads the content of a `config.json`; see `llama.read`."""
    window = declared_fields(TransformerConfig, {"sliding_window": values["sliding_window"]})
    types = tuple(values.get("layer_types") or ())
    return replace(llama.read(values), model_type=MODEL_TYPE, layer_types=types, **window)
