"""Trains Hydra's heads: each learns the target's distribution at its own depth.

Ankner et al. 2024, "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding", with the loss
of the released code: cross-entropy to the target's own distribution, equally weighted over heads.
Heads read the tokens of the text where drafting gives them drafted ones. The target is frozen and
runs in the training step. Slot t counts for head d if token t + 1 + d, which it predicts there,
belongs to an answer. The released recipe drops out a fifth of what each block reads; here there is
no dropout.
"""

from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from specjax.models.cache import KVCache
from specjax.models.config import TransformerConfig
from specjax.models.heads.hydra import HydraConfig, HydraHeads
from specjax.models.heads.training_attention import text_before
from specjax.models.target import QueryRows, Target
from specjax.training.data import slot_mask
from specjax.training.losses import LossFn
from specjax.training.objectives.base import (
    Batch,
    HeadTraining,
    SlotValues,
    in_dtype,
    later,
    over_depths,
    over_slots,
    target_features,
    weighted,
)
from specjax.training.optimizer import OptimizerOptions


@dataclass(frozen=True)
class HydraTraining(HeadTraining):
    """Train Hydra heads: each knows the tokens drafted before; learned from the target's own
    distribution."""

    num_heads: int = 4
    """Heads, and so tokens of the longest draft."""
    num_layers: int = 4
    """Residual blocks of each head."""
    prefix: bool = False
    """Hydra++: a layer over the whole text prepares what the heads read."""
    lm_heads: bool = True
    """Give each head an LM head of its own, as published; without, all use the target's."""

    flags: ClassVar = MappingProxyType(
        {"has_lm_heads": "--lm-heads", "num_hidden_layers": "--prefix"}
    )
    # The released code's, with EAGLE's number of texts per step (theirs depends on the devices).
    optimizer: ClassVar[OptimizerOptions] = OptimizerOptions(
        learning_rate=5e-4,
        decay="cosine",
        decay_to=0.33,
        beta2=0.999,
        weight_decay=0.1,
        clip="norm",
        clip_at=1.0,
    )

    def new_head(self, target: TransformerConfig) -> HydraHeads:
        return HydraHeads(
            HydraConfig.for_target(
                target,
                has_prefix=self.prefix,
                num_heads=self.num_heads,
                num_layers=self.num_layers,
                has_lm_heads=self.lm_heads,
            )
        )

    def loss(self, head: HydraHeads, target: Target, recompute: bool = False) -> LossFn:
        depths = range(1, head.config.num_heads + 1)
        prefix = partial(prefixed, head, target)
        prefix = jax.checkpoint(prefix) if recompute else prefix
        weights = {"logit_loss": 1.0, "top_loss": self.top_weight}

        def loss_fn(params: Any, frozen: Any, batch: Batch, key: Key[Array, ""]):
            del key  # nothing is drawn
            tokens, segments = batch["tokens"], batch["segments"]
            features = target_features(target, frozen, tokens, batch["positions"], segments)
            params = in_dtype(params, features.dtype)
            prepared = prefix(params, features, tokens, batch["positions"], segments)

            def read(arrays: tuple[Array, tuple[Array, ...], Array]) -> SlotValues:
                features, before, wanted = arrays
                embedded = jnp.stack([target.embed(frozen, tokens) for tokens in before], axis=2)
                logits = head.logits(params, target, frozen, len(before), features, embedded)
                return self.logit_values(logits, target.logits(frozen, wanted))

            def at_depth(depth: int):
                before = tuple(later(tokens, ahead) for ahead in range(1, depth + 1))
                arrays = (prepared, before, later(features, depth))
                counts = slot_mask(batch["is_answer"], segments, ahead=1 + depth)
                return weighted(over_slots(read, arrays, recompute), counts, weights)

            return over_depths([at_depth(depth) for depth in depths], [1.0] * len(depths))

        return loss_fn


def prefixed(
    head: HydraHeads,
    target: Target,
    params: Any,
    features: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"],
) -> Float[Array, "B T D"]:
    """Returns what the heads read at every slot of whole texts, which see only themselves."""
    batch, length = tokens.shape
    cache = KVCache.create(head.config.layers, batch, length, features.dtype)
    rows = QueryRows(tokens, positions, text_before(segments))
    return head.run(params, target, None, rows, features, cache)[0]
