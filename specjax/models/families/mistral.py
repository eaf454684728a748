"""Mistral: a Llama whose layers may attend to a sliding window only."""

from collections.abc import Mapping
from typing import Any

from specjax.models.config import TransformerConfig
from specjax.models.families.family import Family, read_common


def read(values: Mapping[str, Any]) -> TransformerConfig:
    """Reads the content of a `config.json`; see `read_common`."""
    types = tuple(values.get("layer_types") or ())
    return read_common(values, sliding_window=values["sliding_window"], layer_types=types)


FAMILY = Family(
    "mistral",
    "MistralForCausalLM",
    read,
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
