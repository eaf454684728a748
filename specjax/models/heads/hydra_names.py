"""How files call the tensors of Hydra heads."""

import re
from collections.abc import Iterable

from specjax.models.heads.hydra import HydraConfig

PREFIX = "prefix_embeding_layer."  # as published
UNUSED = PREFIX + "embed_tokens.weight"  # the prefix layer reads features, not tokens
LM_HEADS, CONNECTION = "hydra_lm_head.", ".res_connection."
BLOCK = re.compile(r"hydra_mlp\.(?P<head>\d+)\.(?P<slot>\d+)\.linear\.weight")


def blocks_in(names: Iterable[str]) -> list[tuple[int, int]]:
    """The head of each block, and its place among the blocks of that head."""
    found = [match for match in map(BLOCK.fullmatch, names) if match]
    return [(int(match["head"]), int(match["slot"])) for match in found]


def stored_names(
    config: HydraConfig, has_dropout: bool, own_paths: Iterable[str]
) -> dict[str, str]:
    """The path in our params of each stored tensor; all later blocks of a head are copies of one.

    Args:
        config: of the heads.
        has_dropout: whether every block, and every LM head, comes behind a place of its list that
            holds no tensors, as published for Hydra++.
        own_paths: all paths in our params, of which those of the prefix layer are looked for.
    """
    first, step = (1, 2) if has_dropout else (0, 1)
    found = {}
    for path in own_paths:
        if path.startswith(("layers_0.", "norm.")):
            found[PREFIX + path.replace("layers_0.", "layers.0.", 1)] = path
    for head in range(config.num_heads):
        for part in ("weight", "bias"):
            for each in ("linear", "res_connection"):
                name = f"hydra_mlp.{head}.{first}.{each}.{part}"
                found[name] = f"first_blocks_{head}.{each}.{part}"
            for layer in range(1, config.num_layers):
                slot = first + step * layer
                found[f"hydra_mlp.{head}.{slot}.linear.{part}"] = f"later_blocks_{head}.{part}"
            if config.has_lm_heads:
                found[lm_head_name(head, has_dropout, part)] = f"lm_heads_{head}.{part}"
    return found


def lm_head_name(head: int, has_dropout: bool, part: str) -> str:
    """The name of the `weight` or `bias` of an LM head."""
    return f"{LM_HEADS}{head}.1.{part}" if has_dropout else f"{LM_HEADS}{head}.{part}"
