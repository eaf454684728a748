"""Qwen 2, 2.5 and 3: attention with biases of query, key and value, or with norms of both."""

from collections.abc import Mapping
from typing import Any

from specjax.models.config import TransformerConfig
from specjax.models.families.family import Family, read_common, windows

DEFAULTS = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}


def read_qwen2(values: Mapping[str, Any]) -> TransformerConfig:
    """Reads the content of a `config.json`; see `read_common`."""
    values = {**values, "attention_bias": True}
    return read_common(values, {"has_output_bias": False}, **_windows(values))


def read_qwen3(values: Mapping[str, Any]) -> TransformerConfig:
    """Reads the content of a `config.json`; see `read_common`."""
    return read_common(values, {"has_qk_norm": True}, **_windows(values))


def _windows(values: Mapping[str, Any]) -> dict[str, Any]:
    window = values["sliding_window"] if values.get("use_sliding_window") else None
    first = values["max_window_layers"]
    return windows(values, lambda layer: layer >= first, window)


def _written(config: TransformerConfig) -> dict[str, Any]:
    return {"use_sliding_window": config.sliding_window is not None}


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", read_qwen2, defaults=DEFAULTS, written=_written)
QWEN3 = Family(
    "qwen3", "Qwen3ForCausalLM", read_qwen3, defaults=DEFAULTS | {"head_dim": 128}, written=_written
)
