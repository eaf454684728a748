"""Medusa heads as files: the authors' of both versions, alone or in a whole model, and vLLM's.

Version 2 has no LM heads and uses the target's. Published configs say 2 heads where there are 5, so
their numbers are not read.
"""

from specjax.models.heads.medusa import MedusaConfig, MedusaHeads
from specjax.models.io.head_format import HeadFile, HeadFormat, Layout, Names, Signs, count, has

SAFETENSORS, TORCH = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
VERSION = {"version": "has_lm_heads"}
KEYS = {"medusa_num_heads": "num_heads", "medusa_num_layers": "num_layers"} | VERSION
VLLM = {"architectures": ["MedusaModel"], "model_type": "medusa", "medusa_fc_bias": True}
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


def _for_authors(file: HeadFile) -> None:
    """They read heads without LM heads from safetensors."""
    if not file.config.has_lm_heads:
        file.name = SAFETENSORS


def _for_vllm(file: HeadFile) -> None:
    """The first LM head serves all heads, where they have none of their own."""
    if not file.config.has_lm_heads:
        file.tensors["lm_heads.0.weight"] = file.lm_head("vLLM")


MEDUSA = HeadFormat(
    kind="medusa",
    signs=Signs("a Medusa head", tensors=rf"(medusa_heads?\.)?({BLOCKS})", config="medusa"),
    module=MedusaHeads,
    config=MedusaConfig.for_target,
    fields={
        "num_heads": count(r"(\d+)\.\d+\.linear\.weight|blocks\.(\d+)\.layers\.\d+\.weight"),
        "num_layers": count(r"\d+\.(\d+)\.linear\.weight|blocks\.\d+\.layers\.(\d+)\.weight"),
        "has_lm_heads": has(LM_HEADS),
    },
    keys=VERSION,
    names=(OF_AUTHORS, OF_VLLM),
    layouts={
        "specjax": Layout(SAFETENSORS, keys=KEYS),
        "medusa": Layout(TORCH, keys=KEYS, names_target=True, edit=_for_authors),  # five heads only
        "vllm": Layout(  # takes any key with "num" and "heads" in it for `num_heads`
            names=lambda config: OF_VLLM,
            keys={
                "num_heads": "num_heads",
                "num_hidden_layers": "num_layers",
                "truncated_vocab_size": "vocab_size",
                "original_lm_head": "has_lm_heads",
            },
            constants=VLLM,
            edit=_for_vllm,
        ),
    },
    spellings={
        "version": {True: "1", False: "2"},
        "original_lm_head": {True: False, False: True},
    },
    sizes={BLOCKS: "hidden_size", LM_HEADS: "vocab_size"},
    limits={"logit_scale": (1,)},
    prefix=r"medusa_heads?\.",
    is_within_model=True,
    ignored_if={"original_lm_head": r"lm_heads\.\d+\.weight|lm_head\.weight"},
    optional=r"blocks\.\d+\.layers\.\d+\.bias",
    required_if="medusa_fc_bias",
    repeated="the layers of a Medusa head",
)
