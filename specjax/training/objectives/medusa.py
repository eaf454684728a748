"""Medusa's objective: each head predicts the text's token at its own depth.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
equation 1: the cross-entropy of head k weighs `head_decay^k`, k from 1. The target is frozen
(Medusa-1). Slot t counts for head d if token t + 1 + d, which it predicts there, belongs to an
answer; the first released trainer counts every token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import optax
from jaxtyping import Array

from specjax.core.ranking import best_token
from specjax.core.settings import setting
from specjax.models.config import TransformerConfig
from specjax.models.heads.medusa import MedusaConfig, MedusaHeads
from specjax.training.blocks import SlotValues
from specjax.training.losses import LossAndMetrics, distribution_loss
from specjax.training.objectives.base import HeadTraining, Prediction, Step, Teacher
from specjax.training.optimizer import OptimizerOptions


@dataclass(frozen=True)
class TokenTraining(HeadTraining):
    """Trains heads that predict the tokens of the text, by Medusa's loss."""

    head_decay: float = setting(0.8, at_least=0)
    """Weight of each head's loss relative to the head before."""

    def logits_of(self, head: Any, step: Step, params: Any, at: Prediction) -> Array:
        """Returns the logits of a prediction; by default those of the target's LM head."""
        return step.logits(at.inputs)

    def token_losses(
        self,
        head: Any,
        step: Step,
        predictions: Sequence[Prediction],
        decays: Sequence[float],
        trained: Any = (),
    ) -> LossAndMetrics:
        """Returns the loss of predictions, and its parts."""

        def values_of(trained: Any, predicted: Prediction, teacher: Teacher) -> SlotValues:
            logits, labels = self.logits_of(head, step, trained, predicted), teacher.labels
            if self.distribution_loss == "cross-entropy":
                loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            else:  # LK losses compare with the target's distribution, not with the text
                loss = distribution_loss(self.distribution_loss, logits, teacher.logits)
            values = {"token_loss": loss, "is_right": best_token(logits) == labels}
            return values | self.top_values(logits, teacher.logits)

        weights = {"token_loss": 1.0, "top_loss": self.top_weight}
        return step.losses(values_of, predictions, weights, decays, trained)


@dataclass(frozen=True)
class MedusaTraining(TokenTraining):
    """Train Medusa heads: each predicts a token further ahead from the same feature."""

    num_heads: int = 5
    """Heads, and so tokens of the longest draft; the published tree uses 4 of them, a dynamic or a
    tuned one all."""
    num_layers: int = 1
    """Residual blocks of each head."""
    lm_heads: bool = True
    """Each head has a separate LM head (version 1); with --no-lm-heads all use the target's
    (version 2)."""

    flags: ClassVar = {"has_lm_heads": "--no-lm-heads"}
    # The released code's, with EAGLE's number of texts per step (theirs depends on the devices).
    optimizer: ClassVar[OptimizerOptions] = OptimizerOptions(
        learning_rate=2e-3, decay="cosine", beta2=0.999, weight_decay=0.0, clip="norm", clip_at=1.0
    )
    epochs: ClassVar[float] = 2.0

    def new_head(self, target: TransformerConfig) -> MedusaHeads:
        shape = MedusaConfig.for_target(target, self.num_heads, self.num_layers, self.lm_heads)
        return MedusaHeads(shape)

    def logits_of(self, head: MedusaHeads, step: Step, params: Any, at: Prediction) -> Array:
        return head.logits(step.weights(params), at.fixed, [at.ahead])[..., 0, :]

    def step_loss(self, head: MedusaHeads, params: Any, step: Step) -> LossAndMetrics:
        depths = range(1, head.config.num_heads + 1)
        predictions = [Prediction(depth, fixed=step.features) for depth in depths]
        decays = [self.head_decay**depth for depth in depths]
        return self.token_losses(head, step, predictions, decays, params)
