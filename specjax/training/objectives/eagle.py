"""Trains an EAGLE head: every slot predicts the target's next feature and distribution.

Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty". Slot t counts
if token t + 2, which it drafts, belongs to an answer; the released code counts it if token t does,
and so loses the first drafted token of each answer. The target runs in the training step; the
released code keeps its features on disk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from specjax.core.pytree import pytree
from specjax.models.config import TransformerConfig
from specjax.models.heads.eagle import EagleConfig, EagleHead
from specjax.training.losses import LossAndMetrics, smooth_l1
from specjax.training.objectives.base import HeadTraining, SlotValues, Step, later, over_slots
from specjax.training.ranges import check_not_negative

NOISE_LENGTH = 512  # tokens of a text whose noise is as wide as `noise` says
LogitValues = Callable[[Float[Array, "B T V"], Float[Array, "B T V"]], SlotValues]


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

    def feature_loss(
        self, step: Step, depth: int, predicted: Float[Array, "B T D"], values: SlotValues
    ) -> LossAndMetrics:
        """Returns the loss of the features predicted for one depth, and its parts.

        `values` are those of `logit_values`: the wanted feature is the one `depth` tokens later.
        """
        distance = smooth_l1(predicted, later(step.features, depth))
        weights = {
            "feature_loss": self.feature_weight,
            "logit_loss": self.logit_weight,
            "top_loss": self.top_weight,
        }
        return step.weighted({"feature_loss": distance, **values}, depth, weights)


@dataclass(frozen=True)
class EagleTraining(FeatureTraining):
    """Train an EAGLE head, which eagle and eagle2 draft with.

    The target reads every text once per epoch, in the training step itself; the head learns to
    predict its next feature and distribution.
    """

    fc_bias: bool = False
    """Give `fc` a bias, as the first published heads have; vLLM reads heads without one only."""

    measured_as: ClassVar[str] = "eagle2"

    def new_head(self, target: TransformerConfig) -> EagleHead:
        return EagleHead(EagleConfig.for_target(target, self.fc_bias))

    def step_loss(self, head: EagleHead, params: Any, step: Step) -> LossAndMetrics:
        slots, read = self.slots(step), logit_reader(step, self.logit_values)

        def loss(params):
            predicted, _ = head.step(
                params, slots.embedded, slots.features, (), slots.positions, slots.segments
            )
            return self.feature_loss(step, 1, predicted, read(predicted, 1))

        return step.checkpoint(loss)(params)


def logit_reader(
    step: Step, values_of: LogitValues
) -> Callable[[Float[Array, "B T D"], int], SlotValues]:
    """Returns a function from features predicted for a depth to the values that need logits.

    The target's own logits are computed here, once for all depths; if the step recomputes, wanted
    and predicted ones are computed chunk by chunk, so that no `[B, T, V]` ever exists.
    """
    own_logits = None if step.recompute else step.logits(step.features)

    def values(predicted: Float[Array, "B T D"], depth: int) -> SlotValues:
        if own_logits is not None:
            return values_of(step.logits(predicted), later(own_logits, depth))

        def read(features: tuple[Array, Array]) -> SlotValues:
            return values_of(*map(step.logits, features))

        return over_slots(read, (predicted, later(step.features, depth)), step.recompute)

    return values


def _noise(
    key: Key[Array, ""], features: Float[Array, "B T D"], segments: Int[Array, "B T"], width: float
) -> Float[Array, "B T D"]:
    """Draws uniform noise, narrower on longer texts, as in the released code."""
    length = jnp.sum(segments[:, :, None] == segments[:, None, :], axis=-1, dtype=jnp.float32)
    spread = (width * NOISE_LENGTH / length)[..., None]
    uniform = jax.random.uniform(key, features.shape, minval=-0.5, maxval=0.5)
    return (uniform * spread).astype(features.dtype)
