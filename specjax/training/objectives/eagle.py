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
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.core.pytree import pytree
from specjax.models.config import TransformerConfig
from specjax.models.heads.eagle import EagleConfig, EagleHead
from specjax.models.target import Target
from specjax.training.data import slot_mask
from specjax.training.losses import LossFn, Metrics, smooth_l1
from specjax.training.objectives.base import (
    Batch,
    HeadTraining,
    SlotValues,
    in_dtype,
    later,
    over_slots,
    target_features,
    weighted,
)
from specjax.training.ranges import check_not_negative

NOISE_LENGTH = 512  # tokens of a text whose noise is as wide as `noise` says
LogitValues = Callable[[Float[Array, "B T V"], Float[Array, "B T V"]], SlotValues]
Reader = Callable[[Float[Array, "B T D"]], SlotValues]


@pytree
class Slots:
    """A batch as the head sees it: slot t holds feature t and token t + 1."""

    embedded: Float[Array, "B T D"]  # of token t + 1
    features: Float[Array, "B T D"]  # of token t: the target's, with noise
    positions: Int[Array, "B T"]
    segments: Int[Array, "B T"]
    wanted: Float[Array, "B T D"]  # feature of token t + 1, so the distribution of token t + 2
    counts: Bool[Array, "B T"]


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

    def prepare(
        self, params: Any, target: Target, frozen: Any, batch: Batch, key: Key[Array, ""]
    ) -> tuple[Any, Slots]:
        """Returns the head's params in the target's dtype, and what it learns from."""
        tokens, segments = batch["tokens"], batch["segments"]
        features = target_features(target, frozen, tokens, batch["positions"], segments)
        slots = Slots(
            embedded=target.embed(frozen, later(tokens)),
            features=features + _noise(key, features, segments, self.noise),
            positions=batch["positions"],
            segments=segments,
            wanted=later(features),
            counts=slot_mask(batch["is_answer"], segments),
        )
        return in_dtype(params, features.dtype), slots

    def step_loss(
        self, predicted: Float[Array, "B T D"], values: SlotValues, slots: Slots
    ) -> tuple[Float[Array, ""], Metrics]:
        """Returns the loss of one step's predictions, and its parts; `values`: `logit_values`."""
        weights = {
            "feature_loss": self.feature_weight,
            "logit_loss": self.logit_weight,
            "top_loss": self.top_weight,
        }
        values = {"feature_loss": smooth_l1(predicted, slots.wanted), **values}
        return weighted(values, slots.counts, weights)


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

    def loss(self, head: EagleHead, target: Target, recompute: bool = False) -> LossFn:
        def loss_fn(params: Any, frozen: Any, batch: Batch, key: Key[Array, ""]):
            params, slots = self.prepare(params, target, frozen, batch, key)
            read = logit_reader(target, frozen, slots, self.logit_values, recompute)

            def one_step(params):
                predicted, _ = head.step(
                    params, slots.embedded, slots.features, (), slots.positions, slots.segments
                )
                return self.step_loss(predicted, read(predicted), slots)

            return (jax.checkpoint(one_step) if recompute else one_step)(params)

        return loss_fn


def logit_reader(
    target: Target, frozen: Any, slots: Slots, values_of: LogitValues, recompute: bool
) -> Reader:
    """Returns a function from predicted features to the values of each slot that depend on logits.

    The wanted logits are computed here, once for all predictions; with `recompute` wanted and
    predicted ones are computed chunk by chunk, and again for the gradients, so that no `[B, T, V]`
    ever exists.

    Args:
        target: whose LM head is read.
        frozen: its params.
        slots: with the wanted features.
        values_of: from predicted and wanted logits to values; of any number of slots.
        recompute: whether to go by chunks.
    """
    if not recompute:
        wanted_logits = target.logits(frozen, slots.wanted)
        return lambda predicted: values_of(target.logits(frozen, predicted), wanted_logits)

    def read(features: tuple[Array, Array]) -> SlotValues:
        predicted, wanted = (target.logits(frozen, each) for each in features)
        return values_of(predicted, wanted)

    return lambda predicted: over_slots(read, (predicted, slots.wanted), recompute)


def _noise(
    key: Key[Array, ""], features: Float[Array, "B T D"], segments: Int[Array, "B T"], width: float
) -> Float[Array, "B T D"]:
    """Draws uniform noise, narrower on longer texts, as in the released code."""
    length = jnp.sum(segments[:, :, None] == segments[:, None, :], axis=-1, dtype=jnp.float32)
    spread = (width * NOISE_LENGTH / length)[..., None]
    uniform = jax.random.uniform(key, features.shape, minval=-0.5, maxval=0.5)
    return (uniform * spread).astype(features.dtype)
