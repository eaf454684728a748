"""Medusa heads as files: the authors' of both versions, alone or in a whole model, and vLLM's.

Version 2 has no LM heads and uses the target's. Published configs name 2 heads where there are 5,
so these numbers are not read.
"""

from typing import Any

from specjax.models.config import TransformerConfig
from specjax.models.heads.medusa import MedusaConfig, MedusaHeads
from specjax.models.io.head_format import (
    NOTHING,
    HeadFile,
    HeadFormat,
    Layout,
    Names,
    Shapes,
    Signature,
    count,
    has,
)

SAFETENSORS, TORCH = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
BLOCKS = r"\d+\.\d+\.linear\.weight|blocks\.\d+\.layers\.\d+\.weight"
LM_HEADS = r"\d+\.\d+\.weight|lm_heads\.\d+\.weight"
OF_AUTHORS = (  # the layers of a head are copies of one block; its LM head comes behind them
    Names("blocks_{}.", "{}.{copy}.linear.", lambda config: range(config.num_layers)),
    Names("lm_heads_{}.", "{}.{num_layers}."),
)
OF_VLLM = (
    Names("blocks_{}.", "blocks.{}.layers.{copy}.", lambda config: range(config.num_layers)),
    Names("lm_heads_{}.", "lm_heads.{}."),
)


def _config(shapes: Shapes, layers: TransformerConfig, *_: Any) -> MedusaConfig:
    return MedusaConfig.for_target(
        layers,
        count(shapes, r"(\d+)\.\d+\.linear\.weight|blocks\.(\d+)\.layers\.\d+\.weight"),
        count(shapes, r"\d+\.(\d+)\.linear\.weight|blocks\.\d+\.layers\.(\d+)\.weight"),
        has(shapes, LM_HEADS),
    )


def _version(config: MedusaConfig) -> str:
    return "1" if config.has_lm_heads else "2"


def _values(config: MedusaConfig) -> dict[str, Any]:
    sizes = {"medusa_num_heads": config.num_heads, "medusa_num_layers": config.num_layers}
    return sizes | {"version": _version(config)}


def _values_for_vllm(config: MedusaConfig) -> dict[str, Any]:
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_fc_bias": True,
        "num_heads": config.num_heads,  # it takes any key with "num" and "heads" in it for this
        "num_hidden_layers": config.num_layers,
        "truncated_vocab_size": config.vocab_size,
        "original_lm_head": not config.has_lm_heads,
    }


def _for_authors(file: HeadFile) -> None:
    """Heads without LM heads are read from safetensors only."""
    file.name_target()
    if not file.config.has_lm_heads:
        file.name = SAFETENSORS


def _for_vllm(file: HeadFile) -> None:
    """Adds the target's LM head for heads without one; the first serves all."""
    if not file.config.has_lm_heads:
        file.tensors["lm_heads.0.weight"] = file.lm_head("vLLM")


MEDUSA = HeadFormat(
    kind="medusa",
    signature=Signature("a Medusa head", tensors=rf"(medusa_heads?\.)?({BLOCKS})", config="medusa"),
    module=MedusaHeads,
    config=_config,
    claims=lambda config: {"version": _version(config), "logit_scale": 1},
    names=(OF_AUTHORS, OF_VLLM),
    layouts={
        "specjax": Layout(SAFETENSORS, values=_values),
        "medusa": Layout(TORCH, values=_values, edit=_for_authors),  # five heads only
        "vllm": Layout(names=lambda config: OF_VLLM, values=_values_for_vllm, edit=_for_vllm),
    },
    sizes={BLOCKS: "hidden_size", LM_HEADS: "vocab_size"},
    prefix=r"medusa_heads?\.",
    is_within_model=True,
    ignored=lambda values: (
        r"lm_heads\.\d+\.weight|lm_head\.weight"
        if values.get("original_lm_head") is True
        else NOTHING
    ),
    optional=lambda values: (
        NOTHING if values.get("medusa_fc_bias") is True else r"blocks\.\d+\.layers\.\d+\.bias"
    ),
)
