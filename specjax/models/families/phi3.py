"""Phi 3, 3.5 and 4: a Llama with fused projections, perhaps with LongRoPE or partial RoPE."""

from collections.abc import Mapping
from typing import Any

from specjax.models.config import TransformerConfig
from specjax.models.families.family import LLAMA_NAMES, Family, read_common

NAMES = (
    ("layers_{}.self_attn.q_proj.", "model.layers.{}.self_attn.qkv_proj."),
    ("layers_{}.self_attn.k_proj.", "model.layers.{}.self_attn.qkv_proj."),
    ("layers_{}.self_attn.v_proj.", "model.layers.{}.self_attn.qkv_proj."),
    ("layers_{}.mlp.gate_proj.", "model.layers.{}.mlp.gate_up_proj."),
    ("layers_{}.mlp.up_proj.", "model.layers.{}.mlp.gate_up_proj."),
    *LLAMA_NAMES,
)


def read(values: Mapping[str, Any]) -> TransformerConfig:
    """Reads the content of a `config.json`; early ones call LongRoPE "su" or "yarn"."""
    scaling = values.get("rope_scaling")
    if isinstance(scaling, Mapping) and scaling.get("type") in ("su", "yarn"):
        values = {**values, "rope_scaling": {**scaling, "type": "longrope"}}
    return read_common(values, can_be_partial=True, sliding_window=values["sliding_window"])


def _written(config: TransformerConfig) -> dict[str, Any]:
    original = config.rope.original_max_position_embeddings
    values = {"original_max_position_embeddings": original} if original else {}
    return values | {"pad_token_id": None}  # the default may be outside the vocabulary


FAMILY = Family(
    "phi3",
    "Phi3ForCausalLM",
    read,
    NAMES,
    defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_id": 32000,
    },
    written=_written,
)
