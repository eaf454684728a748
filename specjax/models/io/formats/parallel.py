"""ParallelSpec heads as files. Nobody has published one: the format is EAGLE's, with masks.

A head that reads no features has no `fc`, but the norms of a Llama.
"""

from dataclasses import replace
from typing import Any

from specjax.models.config import TransformerConfig
from specjax.models.heads.layered import DRAFT_TOKENS
from specjax.models.heads.parallel import ParallelConfig, ParallelHead
from specjax.models.io.formats.eagle import EAGLE
from specjax.models.io.head_format import Layout, Shapes, Signature, has, rows

MASKS = r"mask_embeddings\.weight"


def _config(shapes: Shapes, layers: TransformerConfig, *_: Any) -> ParallelConfig:
    return ParallelConfig(
        layers,
        num_masks=rows(shapes, MASKS),
        reads_features=has(shapes, r"fc\.weight"),
        fc_bias=has(shapes, r"fc\.bias"),
        draft_vocab_size=rows(shapes, DRAFT_TOKENS),
    )


def _claims(config: ParallelConfig) -> dict[str, Any]:
    shape = {"num_masks": config.num_masks, "reads_features": config.reads_features}
    return shape | {"bias": config.fc_bias}


PARALLEL = replace(
    EAGLE,
    kind="parallel",
    signature=Signature("a ParallelSpec head", tensors=MASKS, config="parallelspec|num_masks"),
    module=ParallelHead,
    config=_config,
    claims=_claims,
    layouts={
        "specjax": Layout(
            values=lambda config: {"architectures": ["ParallelSpecHead"], **_claims(config)}
        )
    },
    embedding="",
)
