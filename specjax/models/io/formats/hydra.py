"""Hydra heads as files, as their authors publish them: plain, or of Hydra++ with a prefix layer.

The prefix layer has the shape of one of the target's. Its embedding is ignored, because it reads no
tokens.
"""

from typing import Any

import jax.numpy as jnp

from specjax.models.config import TransformerConfig
from specjax.models.heads.hydra import HydraConfig, HydraHeads
from specjax.models.io.head_format import (
    HeadFile,
    HeadFormat,
    Layout,
    Names,
    Shapes,
    Signature,
    count,
    has,
)

BLOCKS = r"hydra_mlp\.\d+\.\d+\.linear\.weight"


def _naming(first: int, step: int, lm_heads: str) -> tuple[Names, ...]:
    """Names where the blocks of a head have the places `first`, `first + step` and so on."""

    def later(config: HydraConfig) -> range:  # the blocks behind the first are copies of one
        return range(first + step, first + step * config.num_layers, step)

    return (
        Names("layers_{}.", "prefix_embeding_layer.layers.{}."),
        Names("norm.", "prefix_embeding_layer.norm."),
        Names("first_blocks_{}.", f"hydra_mlp.{{}}.{first}."),
        Names("later_blocks_{}.", "hydra_mlp.{}.{copy}.linear.", later),
        Names("lm_heads_{}.", lm_heads),
    )


PLAIN = _naming(0, 1, "hydra_lm_head.{}.")
WITH_DROPOUT = _naming(1, 2, "hydra_lm_head.{}.1.")  # it takes the place before each


def _as_published(config: HydraConfig) -> tuple[Names, ...]:
    return WITH_DROPOUT if config.has_prefix else PLAIN


def _config(shapes: Shapes, layers: TransformerConfig, *_: Any) -> HydraConfig:
    return HydraConfig.for_target(
        layers,
        num_heads=count(shapes, r"hydra_mlp\.(\d+)\.\d+\.linear\.weight"),
        num_layers=count(shapes, r"hydra_mlp\.\d+\.(\d+)\.linear\.weight"),
        has_prefix=has(shapes, r"prefix_embeding_layer\..+"),
        has_lm_heads=has(shapes, r"hydra_lm_head\..+"),
    )


def _claims(config: HydraConfig) -> dict[str, Any]:
    return {
        "hydra_num_heads": config.num_heads,
        "hydra_num_layers": config.num_layers,
        "hydra_head_arch": "prefix-mlp" if config.has_prefix else "mlp",
        "has_lm_heads": config.has_lm_heads,
        "grounded_heads": True,  # the authors' code can train others
        "hidden_state_offset": 0,
    }


def _for_authors(file: HeadFile) -> None:
    """Gives every head an LM head, if only a copy of the target's."""
    file.name_target()
    if file.config.has_lm_heads:
        return
    table = file.lm_head("the authors' code")
    for head in range(file.config.num_heads):
        name = _as_published(file.config)[-1].stored.format(head)
        file.tensors |= {f"{name}weight": table, f"{name}bias": jnp.zeros(table.shape[:1])}
    file.values["has_lm_heads"] = True


HYDRA = HeadFormat(
    kind="hydra",
    signature=Signature("a Hydra head", tensors=BLOCKS, config="hydra"),
    module=HydraHeads,
    config=_config,
    claims=_claims,
    names=(PLAIN, WITH_DROPOUT),
    layouts={
        "specjax": Layout("hydra_lm_head.safetensors", _as_published),
        "hydra": Layout("hydra_lm_head.pt", _as_published, edit=_for_authors),
    },
    sizes={BLOCKS: "hidden_size", r"hydra_lm_head\..+\.weight": "vocab_size"},
    ignored=lambda values: r"prefix_embeding_layer\.embed_tokens\.weight",
)
