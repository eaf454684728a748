"""Hydra heads as files, as their authors publish them: plain, or of Hydra++ with a prefix layer.

The prefix layer is shaped like one of the target's. The embedding that it carries along is ignored,
because it reads no tokens.
"""

import jax.numpy as jnp

from specjax.models.heads.hydra import HydraConfig, HydraHeads
from specjax.models.io.head_format import HeadFile, HeadFormat, Layout, Names, Signs, count, has

BLOCKS = r"hydra_mlp\.\d+\.\d+\.linear\.weight"
CONSTANTS = {"grounded_heads": True, "hidden_state_offset": 0}


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


def _for_authors(file: HeadFile) -> None:
    """Every head has an LM head of its own, if only a copy of the target's."""
    if file.config.has_lm_heads:
        return
    table = file.lm_head("the authors' code")
    for head in range(file.config.num_heads):
        name = _as_published(file.config)[-1].theirs.format(head)
        file.tensors |= {f"{name}weight": table, f"{name}bias": jnp.zeros(table.shape[:1])}
    file.values["has_lm_heads"] = True


HYDRA = HeadFormat(
    kind="hydra",
    signs=Signs("a Hydra head", tensors=BLOCKS, config="hydra"),
    module=HydraHeads,
    config=HydraConfig.for_target,
    fields={
        "num_heads": count(r"hydra_mlp\.(\d+)\.\d+\.linear\.weight"),
        "num_layers": count(r"hydra_mlp\.\d+\.(\d+)\.linear\.weight"),
        "has_prefix": has(r"prefix_embeding_layer\..+"),
        "has_lm_heads": has(r"hydra_lm_head\..+"),
    },
    keys={
        "hydra_num_heads": "num_heads",
        "hydra_num_layers": "num_layers",
        "hydra_head_arch": "has_prefix",
        "has_lm_heads": "has_lm_heads",
    },
    spellings={"hydra_head_arch": {False: "mlp", True: "prefix-mlp"}},
    names=(PLAIN, WITH_DROPOUT),
    layouts={
        "specjax": Layout("hydra_lm_head.safetensors", _as_published, constants=CONSTANTS),
        "hydra": Layout(
            "hydra_lm_head.pt",
            _as_published,
            constants=CONSTANTS,
            names_target=True,
            edit=_for_authors,
        ),
    },
    sizes={BLOCKS: "hidden_size", r"hydra_lm_head\..+\.weight": "vocab_size"},
    limits={  # the authors' code can train others
        "grounded_heads": (True,),
        "hidden_state_offset": (0,),
        "hydra_head_arch": ("mlp", "prefix-mlp"),
    },
    ignored=r"prefix_embeding_layer\.embed_tokens\.weight",
    repeated="the blocks of a Hydra head behind its first",
)
