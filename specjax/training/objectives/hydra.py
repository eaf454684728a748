"""How Hydra's heads are trained: each learns the target's distribution at its own depth.

Ankner et al. 2024, "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding", with the losses
of the released code: cross-entropy to the target's own distribution alone, as much of every head.
Heads read the tokens of the text where drafting gives them drafted ones. The target is frozen and
runs in the step itself. Slot t counts for head d where token t + 1 + d, which it predicts there,
belongs to an answer. The released recipe drops out a fifth of what each block reads; nothing is
dropped here.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from specjax.models.cache import KVCache
from specjax.models.heads.hydra import HydraHeads
from specjax.models.heads.training_attention import text_before
from specjax.models.target import QueryRows, Target
from specjax.training.data import slot_mask
from specjax.training.features import target_features
from specjax.training.loop import LossFn, Metrics
from specjax.training.losses import check_top_loss
from specjax.training.objectives.eagle import logit_values
from specjax.training.objectives.options import HydraObjective
from specjax.training.objectives.slots import SlotValues, later, means, over_slots


def hydra_loss(
    head: HydraHeads, target: Target, settings: HydraObjective, recompute: bool = False
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
    prefix = partial(prefixed, head)
    prefix = jax.checkpoint(prefix) if recompute else prefix

    def loss_fn(params: Any, frozen: Any, batch: dict[str, Array], key: Key[Array, ""]):
        del key  # nothing is drawn
        tokens, positions, segments = (batch[name] for name in ("tokens", "positions", "segments"))
        features = target_features(target, frozen, tokens, positions, segments)
        params = jax.tree.map(lambda leaf: leaf.astype(features.dtype), params)
        read_features = prefix(params, features, tokens, positions, segments)

        def at_depth(depth: int) -> Metrics:
            read = partial(_values_at, head, params, target, frozen, settings)
            behind = tuple(later(tokens, ahead) for ahead in range(1, depth + 1))
            arrays = (read_features, behind, later(features, depth))
            values = over_slots(read, arrays, recompute)
            counts = slot_mask(batch["is_answer"], segments, ahead=1 + depth)
            return means(values, counts)

        of_depths = [at_depth(depth) for depth in depths]
        found = {name: jnp.stack([each[name] for each in of_depths]) for name in of_depths[0]}
        metrics = {name: jnp.mean(value) for name, value in found.items() if name != "is_right"}
        loss = found["logit_loss"]
        if "top_loss" in found:
            loss = loss + settings.top_weight * found["top_loss"]
        return jnp.sum(loss), metrics | {"accuracy": found["is_right"]}

    return loss_fn


def prefixed(
    head: HydraHeads,
    params: Any,
    features: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"],
) -> Float[Array, "B T D"]:
    """What the heads read at every slot of whole texts, which see only themselves."""
    batch, length = tokens.shape
    cache = KVCache.create(head.config.layers, batch, length, features.dtype)
    rows = QueryRows(tokens, positions, text_before(segments))
    return head.run(params, None, rows, features, cache)[0]


def _values_at(
    head: HydraHeads,
    params: Any,
    target: Target,
    frozen: Any,
    settings: HydraObjective,
    arrays: tuple[Array, tuple[Array, ...], Array],
) -> SlotValues:
    """What a head says at each slot, of the tokens behind it, against what is wanted there."""
    features, behind, wanted = arrays
    embedded = jnp.stack([target.embed(frozen, tokens) for tokens in behind], axis=2)
    logits = head.logits(params, target, frozen, len(behind), features, embedded)
    return logit_values(settings, logits, target.logits(frozen, wanted))
