"""Trains an EAGLE head: every slot predicts the target's next feature and distribution.

Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty". Slot t counts
if token t + 2, which it drafts, belongs to an answer; the released code counts it if token t does,
and so loses the first drafted token of each answer. The target runs in the training step; the
released code keeps its features on disk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from specjax.core.pytree import pytree
from specjax.models.config import TransformerConfig
from specjax.models.heads.eagle import EagleConfig, EagleHead
from specjax.training.blocks import SlotValues
from specjax.training.losses import LossAndMetrics, smooth_l1
from specjax.training.objectives.base import HeadTraining, Prediction, Step, Wanted
from specjax.training.ranges import check_not_negative

NOISE_LENGTH = 512  # tokens of a text whose noise is as wide as `noise` says


@pytree
class Slots:
    """A batch as the head sees it: slot t holds feature t and token t + 1."""

    embedded: Float[Array, "B T D"]  # of token t + 1
    features: Float[Array, "B T D"]  # of token t: the target's, with noise
    positions: Int[Array, "B T"]
    segments: Int[Array, "B T"]


@dataclass(frozen=True)
class FeatureTraining(HeadTraining):
    """Trains a head that predicts the target's features, by EAGLE's loss."""

    feature_weight: float = 1.0
    """Weight of the smooth L1 distance to the target's next feature."""
    logit_weight: float = 0.1
    """Weight of the cross-entropy to the target's distribution."""
    noise: float = 0.2
    """Width of the uniform noise on input features, for a text of 512 tokens; less for longer."""

    def __post_init__(self):
        super().__post_init__()
        check_not_negative(self, "feature_weight", "logit_weight", "noise")

    def slots(self, step: Step) -> Slots:
        """Returns what the head reads."""
        positions, segments = step.batch["positions"], step.batch["segments"]
        noise = _noise(step.key, step.features, segments, self.noise)
        return Slots(step.embed(1), step.features + noise, positions, segments)

    def feature_losses(
        self, step: Step, predictions: Sequence[Prediction], decays: Sequence[float] | None = None
    ) -> LossAndMetrics:
        """Returns the loss of predicted features, the inputs of the predictions, and its parts."""

        def values_of(_: Any, predicted: Prediction, wanted: Wanted) -> SlotValues:
            distance = smooth_l1(predicted.inputs, wanted.features)
            logits = step.logits(predicted.inputs)
            return {"feature_loss": distance, **self.logit_values(logits, wanted.logits)}

        weights = {
            "feature_loss": self.feature_weight,
            "logit_loss": self.logit_weight,
            "top_loss": self.top_weight,
        }
        return step.losses(values_of, predictions, weights, decays)


@dataclass(frozen=True)
class EagleTraining(FeatureTraining):
    """Train an EAGLE head, which eagle and eagle2 draft with.

    The target reads every text once per epoch, in the training step itself; the head learns to
    predict its next feature and distribution.
    """

    fc_bias: bool = False
    """Give `fc` a bias, as the first published heads have; vLLM reads heads without one only."""

    epochs: ClassVar[float] = 20.0
    measured_as: ClassVar[str] = "eagle2"

    def new_head(self, target: TransformerConfig) -> EagleHead:
        return EagleHead(EagleConfig.for_target(target, self.fc_bias))

    def step_loss(self, head: EagleHead, params: Any, step: Step) -> LossAndMetrics:
        slots = self.slots(step)
        predicted, _ = step.checkpoint(head.step)(
            params, slots.embedded, slots.features, (), slots.positions, slots.segments
        )
        return self.feature_losses(step, [Prediction(1, predicted)])


def _noise(
    key: Key[Array, ""], features: Float[Array, "B T D"], segments: Int[Array, "B T"], width: float
) -> Float[Array, "B T D"]:
    """Draws uniform noise, narrower on longer texts, as in the released code."""
    length = jnp.sum(segments[:, :, None] == segments[:, None, :], axis=-1, dtype=jnp.float32)
    spread = (width * NOISE_LENGTH / length)[..., None]
    uniform = jax.random.uniform(key, features.shape, minval=-0.5, maxval=0.5)
    return (uniform * spread).astype(features.dtype)
