"""How a ParallelSpec head is trained: each slot and its masks, a group, on what follows there.

Xiao et al. 2024, "ParallelSpec: Parallel Drafter for Efficient Speculative Decoding", section 4.3.
Medusa's kind learns the tokens of the text (equation 3), EAGLE's kind the target's features and
distributions (equation 4, summed over the group). At depth d (from 1) slot t predicts token
t + 1 + d; it counts there where that token belongs to an answer. Gradients flow from masks into the
keys and values of the real slots that they see, as all stand in one sequence.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from specjax.models.heads.eagle import Stream
from specjax.models.heads.parallel import ParallelHead
from specjax.models.target import Target
from specjax.training.data import slot_mask
from specjax.training.features import target_features
from specjax.training.loop import LossFn, Metrics
from specjax.training.losses import check_top_loss
from specjax.training.objectives.eagle import (
    Reader,
    Slots,
    logit_reader,
    logit_values,
    prepare,
    step_loss,
)
from specjax.training.objectives.medusa import token_values
from specjax.training.objectives.options import ParallelEagleObjective, ParallelMedusaObjective
from specjax.training.objectives.slots import SlotValues, later, means, over_slots

# (params, keys and values of the depths above) -> loss, metrics, keys and values of this depth
Depth = Callable[[Any, tuple[Stream, ...]], tuple[Float[Array, ""], Metrics, Stream]]


def parallel_eagle_loss(
    head: ParallelHead,
    target: Target,
    settings: ParallelEagleObjective,
    recompute: bool = False,
) -> LossFn:
    """EAGLE's loss summed over the depths of a group; the frozen params are the target's.

    The head computes in the target's dtype, whatever the dtype of its own params. Time grows with
    the depths. With `recompute` the activations of one depth at a time are kept, and computed again
    for the gradients, and logits are there of `slots.LOGIT_SLOTS` slots of each row at a time.

    Raises:
        SpecjaxError: for a top loss that cannot be, as `losses.check_top_loss`.
    """
    check_top_loss(settings.top_loss, settings.top_k, settings.top_p)

    def loss_fn(params: Any, frozen: Any, batch: dict[str, Array], key: Key[Array, ""]):
        params, slots = prepare(params, target, frozen, batch, key, settings)
        values_of = partial(logit_values, settings)
        wanted_logits = None if recompute else target.logits(frozen, slots.wanted)

        def reader(here: Slots, above: int) -> Reader:
            if wanted_logits is None:
                return logit_reader(target, frozen, here, values_of, recompute)
            wanted = later(wanted_logits, above)  # computed once, and kept once for each depth
            return lambda predicted: values_of(target.logits(frozen, predicted), wanted)

        def one_depth(params: Any, streams: tuple[Stream, ...]):
            above = len(streams)
            here = replace(
                slots, wanted=later(slots.wanted, above), counts=_counts(batch, above + 1)
            )
            predicted, own = head.step(
                params, slots.embedded, slots.features, streams, slots.positions, slots.segments
            )
            values = reader(here, above)(predicted)
            return *step_loss(predicted, values, here, settings), own

        return _over_depths(one_depth, params, [1.0] * head.config.num_depths, recompute)

    return loss_fn


def parallel_medusa_loss(
    head: ParallelHead,
    target: Target,
    settings: ParallelMedusaObjective,
    recompute: bool = False,
) -> LossFn:
    """Cross-entropy with the text's tokens at all depths; the frozen params are the target's.

    The real slot weighs 1, mask i `head_decay**i`. Where neither the head nor a top loss reads the
    target's features, its layers do not run. With `recompute` as `parallel_eagle_loss`.

    Raises:
        SpecjaxError: for a top loss that cannot be, as `losses.check_top_loss`.
    """
    check_top_loss(settings.top_loss, settings.top_k, settings.top_p)
    reads_target = head.config.reads_features or settings.top_weight > 0

    def loss_fn(params: Any, frozen: Any, batch: dict[str, Array], key: Key[Array, ""]):
        del key  # nothing is drawn
        tokens, positions, segments = batch["tokens"], batch["positions"], batch["segments"]
        embedded = target.embed(frozen, later(tokens))
        features = embedded[..., :0]
        if reads_target:
            features = target_features(target, frozen, tokens, positions, segments)
        params = jax.tree.map(lambda leaf: leaf.astype(embedded.dtype), params)

        def one_depth(params: Any, streams: tuple[Stream, ...]):
            depth = len(streams) + 1
            predicted, own = head.step(params, embedded, features, streams, positions, segments)
            arrays = {"predicted": predicted, "labels": later(tokens, 1 + depth)}
            if settings.top_weight > 0:
                arrays["wanted"] = later(features, depth)
            values = over_slots(partial(_token_values, target, frozen, settings), arrays, recompute)
            found = means(values, _counts(batch, depth))
            loss, accuracy = found["token_loss"], found.pop("is_right")
            if "top_loss" in found:
                loss = loss + settings.top_weight * found["top_loss"]
            return loss, found | {"accuracy": accuracy[None]}, own

        weights = [settings.head_decay**masks for masks in range(head.config.num_depths)]
        return _over_depths(one_depth, params, weights, recompute)

    return loss_fn


def _token_values(
    target: Target, frozen: Any, settings: ParallelMedusaObjective, arrays: dict[str, Array]
) -> SlotValues:
    logits = target.logits(frozen, arrays["predicted"])
    wanted = target.logits(frozen, arrays["wanted"]) if "wanted" in arrays else None
    return token_values(settings, logits, arrays["labels"], wanted)


def _counts(batch: dict[str, Array], depth: int) -> Bool[Array, "B T"]:
    return slot_mask(batch["is_answer"], batch["segments"], ahead=1 + depth)


def _over_depths(
    one_depth: Depth, params: Any, weights: list[float], recompute: bool
) -> tuple[Float[Array, ""], Metrics]:
    """The weighted sum of the losses, means of the metrics, and the accuracy depth by depth."""
    run_depth = jax.checkpoint(one_depth) if recompute else one_depth
    total, of_depths = jnp.zeros(()), []
    streams: tuple[Stream, ...] = ()
    for weight in weights:
        loss, metrics, own = run_depth(params, streams)
        total = total + weight * loss
        of_depths.append(metrics)
        streams = (*streams, own)
    accuracy = jnp.concatenate([metrics.pop("accuracy") for metrics in of_depths])
    found = {name: jnp.mean(jnp.stack([each[name] for each in of_depths])) for name in of_depths[0]}
    return total, found | {"accuracy": accuracy}
