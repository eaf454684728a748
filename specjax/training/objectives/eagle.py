"""How an EAGLE head is trained: every slot predicts the target's next feature and distribution.

Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty". Slot t counts
where token t + 2, which it drafts, belongs to an answer; the released code counts it where token t
does, and so loses the first drafted token of each answer. The target runs in the step itself, in
place of features kept on disk.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.models.heads.eagle import EagleHead, embed
from specjax.models.llama import Llama
from specjax.pytree import pytree
from specjax.training.config import EagleObjective
from specjax.training.data import slot_mask
from specjax.training.features import target_features
from specjax.training.loop import LossFn, Metrics
from specjax.training.losses import smooth_l1, soft_cross_entropy

NOISE_LENGTH = 512  # slots of a text at which the noise is as wide as `noise` says


@pytree
class Slots:
    """A batch as the head sees it: slot t holds feature t and token t + 1."""

    embedded: Float[Array, "B T D"]  # of token t + 1
    features: Float[Array, "B T D"]  # of token t, the target's, noisy
    positions: Int[Array, "B T"]
    segments: Int[Array, "B T"]
    wanted: Float[Array, "B T D"]  # feature of token t + 1
    wanted_logits: Float[Array, "B T V"]  # distribution of token t + 2
    counts: Bool[Array, "B T"]

    def mean(self, values: Float[Array, "B T"]) -> Float[Array, ""]:
        """The mean over the slots that count; 0 if there are none."""
        total = jnp.sum(jnp.where(self.counts, values, 0.0))
        return total / jnp.maximum(jnp.sum(self.counts), 1)


def eagle_loss(
    head: EagleHead,
    target: Llama,
    settings: EagleObjective = EagleObjective(),
    recompute: bool = False,
) -> LossFn:
    """The loss for `training.loop`; its frozen params are the target's.

    The head computes in the target's dtype, whatever the dtype of its own params. With `recompute`
    its activations and logits are computed again for the gradients, not kept.
    """

    def one_step(params: Any, frozen: Any, slots: Slots):
        predicted, _ = head.step(
            params, slots.embedded, slots.features, (), slots.positions, slots.segments
        )
        return step_loss(predicted, target.logits(frozen, predicted), slots, settings)

    def loss_fn(params: Any, frozen: Any, batch: dict[str, Array], key: Key[Array, ""]):
        params, slots = prepare(params, target, frozen, batch, key, settings)
        run_step = jax.checkpoint(one_step) if recompute else one_step
        return run_step(params, frozen, slots)

    return loss_fn


def prepare(
    params: Any,
    target: Llama,
    frozen: Any,
    batch: dict[str, Array],
    key: Key[Array, ""],
    settings: EagleObjective,
) -> tuple[Any, Slots]:
    """The head's params in the target's dtype, and what it learns from."""
    tokens, segments = batch["tokens"], batch["segments"]
    features = target_features(target, frozen, tokens, batch["positions"], segments)
    wanted = _next(features)
    slots = Slots(
        embedded=embed(frozen, _next(tokens)),
        features=features + _noise(key, features, segments, settings.noise),
        positions=batch["positions"],
        segments=segments,
        wanted=wanted,
        wanted_logits=target.logits(frozen, wanted),
        counts=slot_mask(batch["is_answer"], segments),
    )
    return jax.tree.map(lambda leaf: leaf.astype(features.dtype), params), slots


def step_loss(
    predicted: Float[Array, "B T D"],
    logits: Float[Array, "B T V"],
    slots: Slots,
    settings: EagleObjective,
) -> tuple[Float[Array, ""], Metrics]:
    """The loss of one step's predictions, and its parts."""
    feature_loss = slots.mean(smooth_l1(predicted, slots.wanted))
    logit_loss = slots.mean(soft_cross_entropy(logits, slots.wanted_logits))
    is_right = jnp.argmax(logits, axis=-1) == jnp.argmax(slots.wanted_logits, axis=-1)
    loss = settings.feature_weight * feature_loss + settings.logit_weight * logit_loss
    return loss, {
        "feature_loss": feature_loss,
        "logit_loss": logit_loss,
        "accuracy": slots.mean(is_right.astype(jnp.float32))[None],
    }


def _next(values: Array) -> Array:
    """What stands one place later; the last place never counts."""
    return jnp.roll(values, -1, axis=1)


def _noise(
    key: Key[Array, ""], features: Float[Array, "B T D"], segments: Int[Array, "B T"], width: float
) -> Float[Array, "B T D"]:
    """Uniform, and narrower on longer texts, as in the released code."""
    length = jnp.sum(segments[:, :, None] == segments[:, None, :], axis=-1, dtype=jnp.float32)
    spread = (width * NOISE_LENGTH / length)[..., None]
    uniform = jax.random.uniform(key, features.shape, minval=-0.5, maxval=0.5)
    return (uniform * spread).astype(features.dtype)
