"""How an EAGLE head is trained: every slot predicts the target's next feature and distribution.

Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty". Slot t counts
where token t + 2, which it drafts, belongs to an answer; the released code counts it where token t
does, and so loses the first drafted token of each answer. The target runs in the step itself, in
place of features kept on disk.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.core.pytree import pytree
from specjax.models.heads.eagle import EagleHead
from specjax.models.target import Target
from specjax.training.data import slot_mask
from specjax.training.features import target_features
from specjax.training.loop import LossFn, Metrics
from specjax.training.losses import check_top_loss, smooth_l1, soft_cross_entropy, top_values
from specjax.training.objectives.options import EagleObjective, TopLossOptions
from specjax.training.objectives.slots import SlotValues, later, means, over_slots

NOISE_LENGTH = 512  # slots of a text at which the noise is as wide as `noise` says
Reader = Callable[[Float[Array, "B T D"]], SlotValues]


@pytree
class Slots:
    """A batch as the head sees it: slot t holds feature t and token t + 1."""

    embedded: Float[Array, "B T D"]  # of token t + 1
    features: Float[Array, "B T D"]  # of token t, the target's, noisy
    positions: Int[Array, "B T"]
    segments: Int[Array, "B T"]
    wanted: Float[Array, "B T D"]  # feature of token t + 1, so the distribution of token t + 2
    counts: Bool[Array, "B T"]

    def mean(self, values: Float[Array, "B T"]) -> Float[Array, ""]:
        """The mean over the slots that count; 0 if there are none."""
        return means({"value": values}, self.counts)["value"]


def eagle_loss(
    head: EagleHead,
    target: Target,
    settings: EagleObjective,
    recompute: bool = False,
) -> LossFn:
    """The loss for `training.loop`; its frozen params are the target's.

    The head computes in the target's dtype, whatever the dtype of its own params. With `recompute`
    its activations and logits are computed again for the gradients, not kept, and logits are there
    of `slots.LOGIT_SLOTS` slots of each row at a time.

    Raises:
        SpecjaxError: for a top loss that cannot be, as `losses.check_top_loss`.
    """
    check_top_loss(settings.top_loss, settings.top_k, settings.top_p)

    def loss_fn(params: Any, frozen: Any, batch: dict[str, Array], key: Key[Array, ""]):
        params, slots = prepare(params, target, frozen, batch, key, settings)
        read = logit_reader(target, frozen, slots, partial(logit_values, settings), recompute)

        def one_step(params):
            predicted, _ = head.step(
                params, slots.embedded, slots.features, (), slots.positions, slots.segments
            )
            return step_loss(predicted, read(predicted), slots, settings)

        run_step = jax.checkpoint(one_step) if recompute else one_step
        return run_step(params)

    return loss_fn


def prepare(
    params: Any,
    target: Target,
    frozen: Any,
    batch: dict[str, Array],
    key: Key[Array, ""],
    settings: EagleObjective,
) -> tuple[Any, Slots]:
    """The head's params in the target's dtype, and what it learns from."""
    tokens, segments = batch["tokens"], batch["segments"]
    features = target_features(target, frozen, tokens, batch["positions"], segments)
    slots = Slots(
        embedded=target.embed(frozen, later(tokens)),
        features=features + _noise(key, features, segments, settings.noise),
        positions=batch["positions"],
        segments=segments,
        wanted=later(features),
        counts=slot_mask(batch["is_answer"], segments),
    )
    return jax.tree.map(lambda leaf: leaf.astype(features.dtype), params), slots


def logit_values(
    settings: TopLossOptions, logits: Float[Array, "B T V"], wanted_logits: Float[Array, "B T V"]
) -> SlotValues:
    """What `step_loss` needs of the logits."""
    is_right = jnp.argmax(logits, axis=-1) == jnp.argmax(wanted_logits, axis=-1)
    values = {"logit_loss": soft_cross_entropy(logits, wanted_logits), "is_right": is_right}
    return values | top_values(settings, logits, wanted_logits)


def logit_reader(
    target: Target,
    frozen: Any,
    slots: Slots,
    values_of: Callable[[Float[Array, "B T V"], Float[Array, "B T V"]], SlotValues],
    recompute: bool,
) -> Reader:
    """From predicted features to the values of each slot that depend on logits.

    The wanted logits are computed here, once for all predictions; with `recompute` they and the
    predicted ones are computed chunk by chunk, and again for the gradients, so that no
    `[B, T, V]` ever exists.

    Args:
        target: whose LM head reads.
        frozen: its params.
        slots: their `wanted` features stand beside the predicted ones.
        values_of: predicted and wanted logits -> values; of any number of slots.
        recompute: whether to go by chunks.
    """
    if not recompute:
        wanted_logits = target.logits(frozen, slots.wanted)
        return lambda predicted: values_of(target.logits(frozen, predicted), wanted_logits)

    def read(features: tuple[Array, Array]) -> SlotValues:
        predicted, wanted = (target.logits(frozen, each) for each in features)
        return values_of(predicted, wanted)

    return lambda predicted: over_slots(read, (predicted, slots.wanted), recompute)


def step_loss(
    predicted: Float[Array, "B T D"],
    values: SlotValues,
    slots: Slots,
    settings: EagleObjective,
) -> tuple[Float[Array, ""], Metrics]:
    """The loss of one step's predictions, and its parts; values as of `logit_values`."""
    feature_loss = slots.mean(smooth_l1(predicted, slots.wanted))
    logit_loss = slots.mean(values["logit_loss"])
    loss = settings.feature_weight * feature_loss + settings.logit_weight * logit_loss
    metrics = {
        "feature_loss": feature_loss,
        "logit_loss": logit_loss,
        "accuracy": slots.mean(values["is_right"].astype(jnp.float32))[None],
    }
    if "top_loss" in values:
        metrics["top_loss"] = slots.mean(values["top_loss"])
        loss = loss + settings.top_weight * metrics["top_loss"]
    return loss, metrics


def _noise(
    key: Key[Array, ""], features: Float[Array, "B T D"], segments: Int[Array, "B T"], width: float
) -> Float[Array, "B T D"]:
    """Uniform, and narrower on longer texts, as in the released code."""
    length = jnp.sum(segments[:, :, None] == segments[:, None, :], axis=-1, dtype=jnp.float32)
    spread = (width * NOISE_LENGTH / length)[..., None]
    uniform = jax.random.uniform(key, features.shape, minval=-0.5, maxval=0.5)
    return (uniform * spread).astype(features.dtype)
