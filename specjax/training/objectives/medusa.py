"""How Medusa's heads are trained: each predicts the text's token at its own depth.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
equation 1, which Xiao et al. 2024, "ParallelSpec: Parallel Drafter for Efficient Speculative
Decoding", repeats as equation 2: the cross-entropy of head k weighs `head_decay^k`, k from 1. The
target is frozen (Medusa-1) and runs in the step itself. Slot t counts for head d where token
t + 1 + d, which it predicts there, belongs to an answer; the first released trainer counts every
token.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key

from specjax.models.heads.medusa import MedusaHeads
from specjax.models.target import Target
from specjax.training.data import slot_mask
from specjax.training.features import target_features
from specjax.training.loop import LossFn, Metrics
from specjax.training.losses import check_top_loss, top_values
from specjax.training.objectives.options import MedusaObjective, TopLossOptions
from specjax.training.objectives.slots import SlotValues, later, means, over_slots


def medusa_loss(
    head: MedusaHeads, target: Target, settings: MedusaObjective, recompute: bool = False
) -> LossFn:
    """The loss for `training.loop`; its frozen params are the target's.

    The heads compute in the target's dtype, whatever the dtype of their own params. With
    `recompute` their activations and logits are computed again for the gradients, not kept, and
    logits are there of one head and `slots.LOGIT_SLOTS` slots of each row at a time.

    Raises:
        SpecjaxError: for a top loss that cannot be, as `losses.check_top_loss`.
    """
    check_top_loss(settings.top_loss, settings.top_k, settings.top_p)
    depths = range(1, head.config.num_heads + 1)

    def loss_fn(params: Any, frozen: Any, batch: dict[str, Array], key: Key[Array, ""]):
        del key  # nothing is drawn
        tokens, segments = batch["tokens"], batch["segments"]
        features = target_features(target, frozen, tokens, batch["positions"], segments)
        params = jax.tree.map(lambda leaf: leaf.astype(features.dtype), params)

        def at_depth(depth: int) -> Metrics:
            read = partial(_values_at, head, params, target, frozen, settings, depth)
            arrays = {"features": features, "labels": later(tokens, 1 + depth)}
            if settings.top_weight > 0:
                arrays["wanted"] = later(features, depth)
            values = over_slots(read, arrays, recompute)
            counts = slot_mask(batch["is_answer"], segments, ahead=1 + depth)
            return means(values, counts)

        of_depths = [at_depth(depth) for depth in depths]
        found = {name: jnp.stack([each[name] for each in of_depths]) for name in of_depths[0]}
        loss = found["token_loss"]
        if "top_loss" in found:
            loss = loss + settings.top_weight * found["top_loss"]
        metrics = {name: jnp.mean(value) for name, value in found.items() if name != "is_right"}
        weights = jnp.array([settings.head_decay**depth for depth in depths])
        return jnp.sum(weights * loss), metrics | {"accuracy": found["is_right"]}

    return loss_fn


def _values_at(
    head: MedusaHeads,
    params: Any,
    target: Target,
    frozen: Any,
    settings: MedusaObjective,
    depth: int,
    arrays: dict[str, Array],
) -> SlotValues:
    """What the head of one depth says at each slot, compared with what is wanted there."""
    logits = head.logits_at(params, target, frozen, arrays["features"], depth)
    wanted = target.logits(frozen, arrays["wanted"]) if "wanted" in arrays else None
    return token_values(settings, logits, arrays["labels"], wanted)


def token_values(
    settings: TopLossOptions,
    logits: Float[Array, "B T V"],
    labels: Int[Array, "B T"],
    wanted_logits: Float[Array, "B T V"] | None,
) -> SlotValues:
    """Cross-entropy with the text's tokens, whether they are the likeliest, and the top loss.

    `wanted_logits` are the target's own; without them there is no top loss.
    """
    values = {
        "token_loss": optax.softmax_cross_entropy_with_integer_labels(logits, labels),
        "is_right": jnp.argmax(logits, axis=-1) == labels,
    }
    return values if wanted_logits is None else values | top_values(settings, logits, wanted_logits)
