"""EAGLE's objective: every slot predicts the target's next feature and distribution.

Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty". Slot t counts
if token t + 2, which it drafts, belongs to an answer; the released code counts it if token t does.
The target runs in the training step; the released code keeps its features on disk, as
`kept_states` does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.core.settings import SettingError, setting
from specjax.models.config import TransformerConfig
from specjax.models.heads.eagle import EagleConfig, EagleHead
from specjax.models.quantize import Weight
from specjax.training.blocks import SlotValues
from specjax.training.losses import LossAndMetrics, smooth_l1
from specjax.training.objectives.base import HeadTraining, Prediction, Step, Teacher

NOISE_LENGTH = 512  # tokens of a text whose noise has exactly the width `noise`


@dataclass(frozen=True)
class FeatureTraining(HeadTraining):
    """Trains a head that predicts the target's features, by EAGLE's loss."""

    feature_weight: float = setting(1.0, at_least=0)
    """Weight of the smooth L1 distance to the target's next feature."""
    logit_weight: float = setting(0.1, at_least=0)
    """Weight of the cross-entropy to the target's distribution."""
    noise: float = setting(0.2, at_least=0)
    """Width of the uniform noise on input features, for a text of 512 tokens; less for longer."""
    draft_vocab: int = setting(0, at_least=0)
    """Tokens that it can draft, the most frequent in the answers; 0: all. With fewer, training and
    drafting are faster, and losses and accuracy compare these tokens alone."""

    def __post_init__(self):
        super().__post_init__()
        if self.draft_vocab and self.distribution_loss != "cross-entropy":
            raise SettingError(
                "draft_vocab", "must be 0 with an LK loss, which compares all tokens"
            )

    def noisy_features(self, step: Step) -> Float[Array, "B T D"]:
        """Adds uniform noise to the target's features, narrower on longer texts, as released."""
        segments, shape = step.batch["segments"], step.features.shape
        is_same = segments[:, :, None] == segments[:, None, :]
        length = jnp.sum(is_same, axis=-1, dtype=jnp.float32)
        widths = (self.noise * NOISE_LENGTH / length)[..., None]
        uniform = jax.random.uniform(step.key, shape, minval=-0.5, maxval=0.5)
        return step.features + (uniform * widths).astype(step.features.dtype)

    def feature_losses(
        self,
        step: Step,
        predictions: Sequence[Prediction],
        lm_head: Weight | None,
        decays: Sequence[float] | None = None,
    ) -> LossAndMetrics:
        """Returns the loss of predicted features, the inputs of the predictions, and its parts."""

        def values_of(_: Any, predicted: Prediction, teacher: Teacher) -> SlotValues:
            distance = smooth_l1(predicted.inputs, teacher.features)
            logits = step.logits(predicted.inputs, lm_head)
            return {"feature_loss": distance, **self.logit_values(logits, teacher.logits)}

        weights = {"feature_loss": self.feature_weight, "logit_loss": self.logit_weight}
        weights["top_loss"] = self.top_weight
        return step.losses(values_of, predictions, weights, decays, lm_head=lm_head)


@dataclass(frozen=True)
class EagleTraining(FeatureTraining):
    """Train an EAGLE head, which eagle and eagle2 draft with.

    The head learns to predict the target's next feature and distribution.
    """

    fc_bias: bool = False
    """Give `fc` a bias, as the first published heads have; vLLM reads heads without one only."""

    epochs: ClassVar[float] = 20.0
    measured_as: ClassVar[str] = "eagle2"

    def new_head(self, target: TransformerConfig) -> EagleHead:
        shape = {"fc_bias": self.fc_bias, "draft_vocab_size": self.draft_vocab}
        return EagleHead(EagleConfig.for_target(target, **shape))

    def step_loss(self, head: EagleHead, params: Any, step: Step) -> LossAndMetrics:
        predicted, _ = step.run_head(head, params, step.embed(1), self.noisy_features(step))
        lm_head = head.lm_head_rows(step.weights(params))
        return self.feature_losses(step, [Prediction(1, predicted)], lm_head)
