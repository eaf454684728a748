"""Random ParallelSpec heads for the tiny targets, and their drafters."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from specjax.decoding.drafters._trees import Choices

from specjax.decoding.drafter import Params
from specjax.decoding.drafters.parallel_spec import (
    ParallelMedusaSettings,
    ParallelSettings,
    ParallelSpec,
)
from specjax.models.heads.parallel import ParallelConfig, ParallelHead
from tests.decoding.tiny import target

MASKS = 3
TREE: Choices = (  # one depth less than the head predicts
    *((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0)),
)


@cache
def parallel_head(
    reads_features: bool = True, vocab_size: int = 40, layers: int = 2, seed: int = 7
) -> tuple[Any, Any]:
    """A random head for `target(vocab_size, layers)`, large enough for its context to matter."""
    config = ParallelConfig.for_target(target(vocab_size, layers)[0].config, MASKS, reads_features)
    module = ParallelHead(config)

    def larger(path, leaf):
        if path[0].key.startswith("mask"):
            return leaf * 50
        is_attention = path[-2].key in ("q_proj", "k_proj", "o_proj")
        return leaf * (20 if is_attention else 8) if leaf.ndim == 2 else leaf

    params = module.initialise(jax.random.key(seed))
    return module, jax.tree_util.tree_map_with_path(larger, params)


@cache
def parallel_params(
    reads_features: bool = True, vocab_size: int = 40, layers: int = 2, **of_target: Any
) -> Params:
    weights = parallel_head(reads_features, vocab_size, layers)[1]
    return Params(target(vocab_size, layers, **of_target)[1], weights)


PARALLEL_EAGLE = ParallelSpec(parallel_head()[0], target()[0], ParallelSettings(TREE))
PARALLEL_MEDUSA = ParallelSpec(parallel_head(False)[0], target()[0], ParallelMedusaSettings(TREE))
PARALLEL_DYNAMIC = ParallelSpec(
    parallel_head()[0], target()[0], ParallelSettings(tree="dynamic", top_k=3, num_tokens=12)
)


def features_for(module: ParallelHead, features: Any) -> Any:
    """What the head reads of the target's features: all, or nothing."""
    return features if module.config.reads_features else jnp.zeros((*features.shape[:2], 0))
