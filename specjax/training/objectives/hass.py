"""HASS: an EAGLE head that trains in the contexts of drafting, on the tokens that matter.

Zhang et al. 2025, "Learning Harmonized Representations for Speculative Sampling". *Harmonized
context alignment* (section 3.2): at step n every slot stands for the n-th token of a draft. It
takes the feature that the head itself predicted at step n - 1, one slot earlier, and sees the
features that a draft of that length would see (`EagleHead.step`). *Harmonized objective
distillation* (section 3.1): cross-entropy over the target's K most likely tokens, beside EAGLE's
losses.

The released code multiplies attention logits by the alignment mask, which leaves masked columns
in the softmax; here they are out of it. Features carry no gradient from step to step.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.models.heads.eagle import EagleHead, Stream
from specjax.models.target import Target
from specjax.training.loop import LossFn
from specjax.training.losses import check_top_loss
from specjax.training.objectives.eagle import (
    Slots,
    logit_reader,
    logit_values,
    prepare,
    step_loss,
)
from specjax.training.objectives.options import HassObjective
from specjax.training.objectives.slots import SlotValues


def hass_loss(
    head: EagleHead,
    target: Target,
    settings: HassObjective,
    recompute: bool = False,
) -> LossFn:
    """The loss for `training.loop`; its frozen params are the target's.

    Time grows with `align_steps`, and memory by the keys and values that each step adds; with
    `recompute` the activations of one step at a time are kept, and computed again for gradients,
    and logits are there of some slots of each row at a time (`slots.LOGIT_SLOTS`).

    Raises:
        SpecjaxError: for a top loss that cannot be, as `losses.check_top_loss`.
    """
    check_top_loss(settings.top_loss, settings.top_k, settings.top_p)

    def values_of(logits: Array, wanted_logits: Array) -> SlotValues:
        drafted = {"drafted": jnp.argmax(logits, axis=-1)}
        return logit_values(settings, logits, wanted_logits) | drafted

    def loss_fn(params: Any, frozen: Any, batch: dict[str, Array], key: Key[Array, ""]):
        params, slots = prepare(params, target, frozen, batch, key, settings)
        read = logit_reader(target, frozen, slots, values_of, recompute)

        def one_step(params, embedded, features, streams):
            predicted, own = head.step(
                params, embedded, features, streams, slots.positions, slots.segments
            )
            values = read(predicted)
            loss, metrics = step_loss(predicted, values, slots, settings)
            return loss, metrics, jax.lax.stop_gradient(predicted), values["drafted"], own

        run_step = jax.checkpoint(one_step) if recompute else one_step
        total, of_steps = jnp.zeros(()), []
        embedded, features = slots.embedded, slots.features
        streams: tuple[Stream, ...] = ()
        for step in range(settings.align_steps):
            loss, metrics, predicted, drafted, own = run_step(params, embedded, features, streams)
            total = total + settings.step_decay**step * loss
            of_steps.append(metrics)
            streams = (*streams, own)
            features = next_stream(features, predicted, slots.segments)
            if settings.token_alignment > 0:
                embedded = _with_drafted(
                    slots, target.embed(frozen, drafted), jax.random.fold_in(key, step), settings
                )
        return total, _joined(of_steps)

    return loss_fn


def next_stream(
    features: Float[Array, "B T D"],
    predicted: Float[Array, "B T D"],
    segments: Int[Array, "B T"],
) -> Float[Array, "B T D"]:
    """The features of the next step: each slot's was predicted one slot before.

    The first slot of a text keeps the target's feature: a draft can begin there at the earliest.
    """
    return jnp.where(_is_first(segments)[..., None], features, jnp.roll(predicted, 1, axis=1))


def _is_first(segments: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    return (segments != jnp.roll(segments, 1, axis=1)).at[:, 0].set(True)


def _with_drafted(
    slots: Slots, embedded: Float[Array, "B T D"], key: Key[Array, ""], settings: HassObjective
) -> Float[Array, "B T D"]:
    """Some slots take the token that the step before drafted one slot earlier (appendix B)."""
    is_drafted = jax.random.bernoulli(key, settings.token_alignment, slots.counts.shape)
    is_drafted = is_drafted & ~_is_first(slots.segments)
    return jnp.where(is_drafted[..., None], jnp.roll(embedded, 1, axis=1), slots.embedded)


def _joined(of_steps: list[dict[str, Array]]) -> dict[str, Array]:
    """Means over the steps; the accuracy is told step by step."""
    accuracy = jnp.concatenate([metrics.pop("accuracy") for metrics in of_steps])
    means = {
        name: jnp.mean(jnp.stack([metrics[name] for metrics in of_steps])) for name in of_steps[0]
    }
    return means | {"accuracy": accuracy}
