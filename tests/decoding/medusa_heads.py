"""Random Medusa heads for the tiny targets, their drafters, and what they say by the formula."""

from functools import cache
from typing import Any

import jax
import numpy as np
from jaxtyping import Float
from specjax.decoding.drafters._trees import Choices

from specjax.decoding.drafters.medusa import Medusa, MedusaSettings
from specjax.models.heads.medusa import MedusaConfig, MedusaHeads
from tests.decoding.tiny import target


@cache
def medusa_head(
    vocab_size: int = 40,
    layers: int = 2,
    num_heads: int = 4,
    has_lm_heads: bool = True,
    seed: int = 7,
) -> tuple[MedusaHeads, Any]:
    """Random heads for `target(vocab_size, layers)`, none of whose params is without effect."""
    sizes = target(vocab_size, layers)[0].config
    module = MedusaHeads(MedusaConfig.for_target(sizes, num_heads, 2, has_lm_heads))
    leaves, tree = jax.tree.flatten(module.initialise(jax.random.key(seed)))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [
        0.3 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)
    ]
    return module, jax.tree.unflatten(tree, drawn)


def said(
    module: MedusaHeads, params: Any, feature: np.ndarray, lm_head: np.ndarray
) -> Float[np.ndarray, "K V"]:
    """The logits of all heads at one feature, in float64; `lm_head` is the target's."""
    found = []
    for number in range(module.config.num_heads):
        block = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params[f"blocks_{number}"])
        x = np.asarray(feature, np.float64)
        for _ in range(module.config.num_layers):
            inner = block["weight"] @ x + block["bias"]
            x = x + inner / (1 + np.exp(-inner))
        own = params[f"lm_heads_{number}"]["weight"] if module.config.has_lm_heads else lm_head
        found.append(np.asarray(own, np.float64) @ x)
    return np.stack(found)


CHOICES: Choices = (  # one head fewer deep than there are heads
    *((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0)),
    *((0, 0, 0), (0, 0, 1), (1, 0, 0)),
)
MEDUSA = Medusa(medusa_head()[0], target()[0], MedusaSettings(CHOICES))
MEDUSA_DYNAMIC = Medusa(
    medusa_head()[0],
    target()[0],
    MedusaSettings(tree="dynamic", top_k=3, num_tokens=12, depth=3),
)
