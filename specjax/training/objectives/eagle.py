"""How an EAGLE head is trained: every slot predicts the target's next feature and distribution.

Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty". Slot t counts
where token t + 2, which it drafts, belongs to an answer; the released code counts it where token t
does, and so loses the first drafted token of each answer. The target runs in the step itself, in
place of features kept on disk.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
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
# Slots of each row whose logits are there at a time when they are computed again: with a vocabulary
# of 128k and 8 rows an array of them is 1 GB (of 2048 slots 8 GB), and the LM head, which each
# chunk reads whole, still has 2048 slots to be read for. Chunks are even, and at most as long.
LOGIT_SLOTS = 256

SlotValues = dict[str, Array]  # `[B, T]` each, by name
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
    its activations and logits are computed again for the gradients, not kept, and logits are there
    of `LOGIT_SLOTS` slots of each row at a time.
    """

    def loss_fn(params: Any, frozen: Any, batch: dict[str, Array], key: Key[Array, ""]):
        params, slots = prepare(params, target, frozen, batch, key, settings)
        read = logit_reader(target, frozen, slots, logit_values, recompute)

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
    target: Llama,
    frozen: Any,
    batch: dict[str, Array],
    key: Key[Array, ""],
    settings: EagleObjective,
) -> tuple[Any, Slots]:
    """The head's params in the target's dtype, and what it learns from."""
    tokens, segments = batch["tokens"], batch["segments"]
    features = target_features(target, frozen, tokens, batch["positions"], segments)
    slots = Slots(
        embedded=embed(frozen, _next(tokens)),
        features=features + _noise(key, features, segments, settings.noise),
        positions=batch["positions"],
        segments=segments,
        wanted=_next(features),
        counts=slot_mask(batch["is_answer"], segments),
    )
    return jax.tree.map(lambda leaf: leaf.astype(features.dtype), params), slots


def logit_values(logits: Float[Array, "B T V"], wanted_logits: Float[Array, "B T V"]) -> SlotValues:
    """What `step_loss` needs of the logits."""
    is_right = jnp.argmax(logits, axis=-1) == jnp.argmax(wanted_logits, axis=-1)
    return {"logit_loss": soft_cross_entropy(logits, wanted_logits), "is_right": is_right}


def logit_reader(
    target: Llama,
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

    def read(predicted: Array, wanted_logits: Array) -> SlotValues:
        return values_of(target.logits(frozen, predicted), wanted_logits)

    if not recompute:
        wanted_logits = target.logits(frozen, slots.wanted)
        return lambda predicted: read(predicted, wanted_logits)

    @jax.checkpoint
    def read_chunk(features: tuple[Array, Array]) -> SlotValues:
        predicted, wanted = features
        return read(predicted, target.logits(frozen, wanted))

    return lambda predicted: _by_chunks(read_chunk, (predicted, slots.wanted))


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
    return loss, {
        "feature_loss": feature_loss,
        "logit_loss": logit_loss,
        "accuracy": slots.mean(values["is_right"].astype(jnp.float32))[None],
    }


def _by_chunks(
    read: Callable[[tuple[Array, Array]], SlotValues],
    features: tuple[Float[Array, "B T D"], Float[Array, "B T D"]],
) -> SlotValues:
    """`read` over one chunk of the slots after the other; zeros fill up the last one."""
    batch, length, width = features[0].shape
    num_chunks = -(-length // LOGIT_SLOTS)
    size = -(-length // num_chunks)

    def split(values: Float[Array, "B T D"]) -> Float[Array, "C B t D"]:
        filled = jnp.pad(values, ((0, 0), (0, num_chunks * size - length), (0, 0)))
        return jnp.moveaxis(filled.reshape(batch, num_chunks, size, width), 1, 0)

    def join(values: Array) -> Array:
        return jnp.moveaxis(values, 0, 1).reshape(batch, -1)[:, :length]

    return jax.tree.map(join, lax.map(read, jax.tree.map(split, features)))


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
