"""Trains a ParallelSpec head: each slot and its masks, a group, learn what follows there.

Xiao et al. 2024, "ParallelSpec: Parallel Drafter for Efficient Speculative Decoding", section 4.3.
Medusa's kind learns the tokens of the text (equation 3), EAGLE's kind the target's features and
distributions (equation 4, summed over the group). At depth d (from 1) slot t predicts token
t + 1 + d; it counts there if that token belongs to an answer. Gradients flow from masks into the
keys and values of the real slots that they see, because all stand in one sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from jaxtyping import Array, Float, Key

from specjax.models.config import TransformerConfig
from specjax.models.heads.eagle import EagleHead
from specjax.models.heads.layered import Stream
from specjax.models.heads.parallel import ParallelConfig, ParallelHead, from_eagle
from specjax.training.losses import LossAndMetrics
from specjax.training.objectives.base import HeadTraining, Step, over_depths
from specjax.training.objectives.eagle import FeatureTraining, logit_reader
from specjax.training.objectives.medusa import TokenTraining
from specjax.training.optimizer import OptimizerOptions


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

    def over_group(
        self,
        head: ParallelHead,
        params: Any,
        step: Step,
        features: Float[Array, "B T F"],
        loss_of: Callable[[int, Float[Array, "B T D"]], LossAndMetrics],
        decay: float = 1.0,
    ) -> LossAndMetrics:
        """Sums the losses of all depths of the groups, which run one after another.

        The real slot weighs 1, mask i `decay**i`. `loss_of` takes a depth and what the head
        predicts there; `features` are what the head reads of the target's.
        """
        embedded, places = step.embed(1), (step.batch["positions"], step.batch["segments"])

        def one_depth(params: Any, streams: tuple[Stream, ...]):
            predicted, own = head.step(params, embedded, features, streams, *places)
            return loss_of(len(streams) + 1, predicted), own

        parts, streams = [], ()
        for _ in range(head.config.num_depths):
            part, own = step.checkpoint(one_depth)(params, streams)
            parts.append(part)
            streams = (*streams, own)
        return over_depths(parts, [decay**masks for masks in range(len(parts))])


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

    def step_loss(self, head: ParallelHead, params: Any, step: Step) -> LossAndMetrics:
        def loss_of(depth: int, predicted: Array) -> LossAndMetrics:
            return self.depth_loss(step, depth, predicted, step.logits)

        features = step.features if head.config.reads_features else step.features[..., :0]
        return self.over_group(head, params, step, features, loss_of, self.head_decay)


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

    def step_loss(self, head: ParallelHead, params: Any, step: Step) -> LossAndMetrics:
        read = logit_reader(step, self.logit_values)

        def loss_of(depth: int, predicted: Array) -> LossAndMetrics:
            return self.feature_loss(step, depth, predicted, read(predicted, depth))

        return self.over_group(head, params, step, self.slots(step).features, loss_of)
