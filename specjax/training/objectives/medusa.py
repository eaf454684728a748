"""Trains Medusa's heads: each predicts the text's token at its own depth.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
equation 1, which Xiao et al. 2024, "ParallelSpec: Parallel Drafter for Efficient Speculative
Decoding", repeats as equation 2: the cross-entropy of head k weighs `head_decay^k`, k from 1. The
target is frozen (Medusa-1) and runs in the training step. Slot t counts for head d if token
t + 1 + d, which it predicts there, belongs to an answer; the first released trainer counts every
token.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Key

from specjax.models.config import TransformerConfig
from specjax.models.heads.medusa import MedusaConfig, MedusaHeads
from specjax.models.target import Target
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
from specjax.training.ranges import check_not_negative


@dataclass(frozen=True)
class TokenTraining(HeadTraining):
    """Trains heads that predict the tokens of the text, by Medusa's loss."""

    head_decay: float = 0.8
    """Weight of each head's loss relative to the head before."""

    def __post_init__(self):
        super().__post_init__()
        check_not_negative(self, "head_decay")

    def token_values(
        self, logits: Float[Array, "B T V"], arrays: Batch, target: Target, frozen: Any
    ) -> SlotValues:
        """Returns the losses of each slot, by its label and for a top loss its wanted feature."""
        labels = arrays["labels"]
        values = {
            "token_loss": optax.softmax_cross_entropy_with_integer_labels(logits, labels),
            "is_right": jnp.argmax(logits, axis=-1) == labels,
        }
        if "wanted" not in arrays:
            return values
        return values | self.top_values(logits, target.logits(frozen, arrays["wanted"]))

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the losses of one depth."""
        return {"token_loss": 1.0, "top_loss": self.top_weight}


@dataclass(frozen=True)
class MedusaTraining(TokenTraining):
    """Train Medusa heads: each predicts a token further ahead from the same feature."""

    num_heads: int = 5
    """Heads, and so tokens of the longest draft; the published tree uses 4 of them, a dynamic or a
    tuned one all."""
    num_layers: int = 1
    """Residual blocks of each head."""
    lm_heads: bool = True
    """Give each head an LM head of its own (version 1); without, all use the target's (2)."""

    flags: ClassVar = MappingProxyType({"has_lm_heads": "--lm-heads"})
    # The released code's, with EAGLE's number of texts per step (theirs depends on the devices).
    optimizer: ClassVar[OptimizerOptions] = OptimizerOptions(
        learning_rate=2e-3,
        decay="cosine",
        beta2=0.999,
        weight_decay=0.0,
        clip="norm",
        clip_at=1.0,
    )

    def new_head(self, target: TransformerConfig) -> MedusaHeads:
        shape = MedusaConfig.for_target(target, self.num_heads, self.num_layers, self.lm_heads)
        return MedusaHeads(shape)

    def loss(self, head: MedusaHeads, target: Target, recompute: bool = False) -> LossFn:
        depths = range(1, head.config.num_heads + 1)

        def loss_fn(params: Any, frozen: Any, batch: Batch, key: Key[Array, ""]):
            del key  # nothing is drawn
            tokens, segments = batch["tokens"], batch["segments"]
            features = target_features(target, frozen, tokens, batch["positions"], segments)
            params = in_dtype(params, features.dtype)

            def at_depth(depth: int):
                def read(arrays: dict[str, Array]) -> SlotValues:
                    logits = head.logits_at(params, target, frozen, arrays["features"], depth)
                    return self.token_values(logits, arrays, target, frozen)

                arrays = {"features": features, "labels": later(tokens, 1 + depth)}
                if self.top_weight > 0:
                    arrays["wanted"] = later(features, depth)
                counts = slot_mask(batch["is_answer"], segments, ahead=1 + depth)
                return weighted(over_slots(read, arrays, recompute), counts, self.weights)

            parts = [at_depth(depth) for depth in depths]
            return over_depths(parts, [self.head_decay**depth for depth in depths])

        return loss_fn
