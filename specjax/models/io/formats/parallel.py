"""ParallelSpec heads as files. Nobody has published one: the format is EAGLE's, with masks.

A head that reads no features has no `fc`, but the norms of a Llama.
"""

from dataclasses import replace

from specjax.models.heads.layered import DRAFT_TOKENS
from specjax.models.heads.parallel import ParallelConfig, ParallelHead
from specjax.models.io.formats.eagle import EAGLE
from specjax.models.io.head_format import Layout, Signs, has, rows

MASKS = r"mask_embeddings\.weight"

PARALLEL = replace(
    EAGLE,
    kind="parallel",
    signs=Signs("a ParallelSpec head", tensors=MASKS, config="parallelspec|num_masks"),
    module=ParallelHead,
    config=ParallelConfig,
    fields={
        "num_masks": rows(MASKS),
        "reads_features": has(r"fc\.weight"),
        "fc_bias": has(r"fc\.bias"),
        "draft_vocab_size": rows(DRAFT_TOKENS, 0),
    },
    keys={"num_masks": "num_masks", "reads_features": "reads_features", "bias": "fc_bias"},
    layouts={"specjax": Layout(constants={"architectures": ["ParallelSpecHead"]})},
    embedding="",
)
