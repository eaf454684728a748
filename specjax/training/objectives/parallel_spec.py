"""Trains a ParallelSpec head: each slot and its masks, a group, learn what follows there.

Xiao et al. 2024, "ParallelSpec: Parallel Drafter for Efficient Speculative Decoding", section 4.3.
Medusa's kind learns the tokens of the text (equation 3), EAGLE's kind the target's features and
distributions (equation 4, summed over the group). At depth d (from 1) slot t predicts token
t + 1 + d; it counts there if that token belongs to an answer. Gradients flow from masks into the
keys and values of the real slots that they see, because all stand in one sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import jax
from jaxtyping import Array, Bool, Float, Key

from specjax.models.config import TransformerConfig
from specjax.models.heads.eagle import EagleHead, Stream
from specjax.models.heads.parallel import ParallelConfig, ParallelHead, from_eagle
from specjax.models.target import Target
from specjax.training.data import slot_mask
from specjax.training.losses import LossFn, Metrics
from specjax.training.objectives.base import (
    Batch,
    HeadTraining,
    SlotValues,
    in_dtype,
    later,
    over_depths,
    over_slots,
    target_features,
    weighted,
)
from specjax.training.objectives.eagle import FeatureTraining, Reader, Slots, logit_reader
from specjax.training.objectives.medusa import TokenTraining
from specjax.training.optimizer import OptimizerOptions

LossAndMetrics = tuple[Float[Array, ""], Metrics]
# Params, and keys and values of the depths above -> loss, metrics, keys and values of this depth.
Depth = Callable[[Any, tuple[Stream, ...]], tuple[LossAndMetrics, Stream]]


@dataclass(frozen=True)
class ParallelTraining(HeadTraining):
    """The shape of a ParallelSpec head, of both kinds."""

    num_masks: int = 4
    """Masks of each group (K); a draft has one token more, if its tree is as deep: Medusa's has 4,
    EAGLE's 5, a dynamic or a tuned one as many as there are."""
    num_layers: int = 1
    """Layers of the head; the paper uses 1. With 2, masks can look for what the text repeats."""
    fc_bias: bool = False
    """Give `fc` a bias, where features are read."""

    flags: ClassVar = MappingProxyType(
        {"reads_features": "--features", "num_hidden_layers": "--num-layers"}
    )
    adopts: ClassVar = ("eagle",)

    def adopt(self, head: Any, params: Any, key: Key[Array, ""]) -> tuple[Any, Any]:
        """Gives an EAGLE head new masks."""
        if isinstance(head, EagleHead):
            return from_eagle(head, params, self.num_masks, key)
        return head, params

    def parallel_head(self, target: TransformerConfig, reads_features: bool) -> ParallelHead:
        """Returns a new head."""
        shape = self.num_masks, reads_features, self.fc_bias, self.num_layers
        return ParallelHead(ParallelConfig.for_target(target, *shape))


@dataclass(frozen=True)
class ParallelMedusaTraining(ParallelTraining, TokenTraining):
    """Train Medusa's ParallelSpec: one layer over the text drafts all tokens in one pass."""

    features: bool = False
    """Also read the target's features, as parallel-eagle does; the paper's head does not."""
    head_decay: float = 0.8
    """Weight of each mask's loss relative to the slot before (lambda)."""

    # Table 3 of the paper, whose batches of 32 texts are made of four here.
    optimizer: ClassVar[OptimizerOptions] = OptimizerOptions(
        learning_rate=5e-4, beta2=0.999, weight_decay=0.0, accumulate=4
    )
    epochs: ClassVar = 20.0

    def new_head(self, target: TransformerConfig) -> ParallelHead:
        return self.parallel_head(target, self.features)

    def loss(self, head: ParallelHead, target: Target, recompute: bool = False) -> LossFn:
        # The real slot weighs 1, mask i `head_decay**i`. Unless the head or a top loss reads the
        # target's features, its layers do not run.
        reads_target = head.config.reads_features or self.top_weight > 0

        def loss_fn(params: Any, frozen: Any, batch: Batch, key: Key[Array, ""]):
            del key  # nothing is drawn
            tokens, positions, segments = batch["tokens"], batch["positions"], batch["segments"]
            embedded = target.embed(frozen, later(tokens))
            features = embedded[..., :0]
            if reads_target:
                features = target_features(target, frozen, tokens, positions, segments)

            def read(arrays: dict[str, Array]) -> SlotValues:
                logits = target.logits(frozen, arrays["predicted"])
                return self.token_values(logits, arrays, target, frozen)

            def one_depth(params: Any, streams: tuple[Stream, ...]):
                depth = len(streams) + 1
                predicted, own = head.step(params, embedded, features, streams, positions, segments)
                arrays = {"predicted": predicted, "labels": later(tokens, 1 + depth)}
                if self.top_weight > 0:
                    arrays["wanted"] = later(features, depth)
                values = over_slots(read, arrays, recompute)
                return weighted(values, _counts(batch, depth), self.weights), own

            weights = [self.head_decay**masks for masks in range(head.config.num_depths)]
            return _over_group(one_depth, in_dtype(params, embedded.dtype), weights, recompute)

        return loss_fn


@dataclass(frozen=True)
class ParallelEagleTraining(ParallelTraining, FeatureTraining):
    """Train EAGLE's ParallelSpec: one pass over text and features drafts all tokens."""

    # Table 3 again.
    optimizer: ClassVar[OptimizerOptions] = OptimizerOptions(
        learning_rate=5e-5, weight_decay=0.0, accumulate=4
    )
    epochs: ClassVar = 40.0

    def new_head(self, target: TransformerConfig) -> ParallelHead:
        return self.parallel_head(target, True)

    def loss(self, head: ParallelHead, target: Target, recompute: bool = False) -> LossFn:
        def loss_fn(params: Any, frozen: Any, batch: Batch, key: Key[Array, ""]):
            params, slots = self.prepare(params, target, frozen, batch, key)
            wanted_logits = None if recompute else target.logits(frozen, slots.wanted)

            def reader(here: Slots, above: int) -> Reader:
                if wanted_logits is None:
                    return logit_reader(target, frozen, here, self.logit_values, recompute)
                wanted = later(wanted_logits, above)  # computed once, and kept once for each depth
                return lambda predicted: self.logit_values(target.logits(frozen, predicted), wanted)

            def one_depth(params: Any, streams: tuple[Stream, ...]):
                above = len(streams)
                here = replace(
                    slots, wanted=later(slots.wanted, above), counts=_counts(batch, above + 1)
                )
                predicted, own = head.step(
                    params, slots.embedded, slots.features, streams, slots.positions, slots.segments
                )
                return self.step_loss(predicted, reader(here, above)(predicted), here), own

            return _over_group(one_depth, params, [1.0] * head.config.num_depths, recompute)

        return loss_fn


def _counts(batch: Batch, depth: int) -> Bool[Array, "B T"]:
    return slot_mask(batch["is_answer"], batch["segments"], ahead=1 + depth)


def _over_group(
    one_depth: Depth, params: Any, weights: list[float], recompute: bool
) -> LossAndMetrics:
    """Runs the depths of all groups one after another; time grows with their number."""
    run_depth = jax.checkpoint(one_depth) if recompute else one_depth
    parts, streams = [], ()
    for _ in range(len(weights)):
        part, own = run_depth(params, streams)
        parts.append(part)
        streams = (*streams, own)
    return over_depths(parts, weights)
