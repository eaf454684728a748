"""ParallelSpec's objectives: each slot and its masks, a group, learn the tokens that follow.

Xiao et al. 2024, "ParallelSpec: Parallel Drafter for Efficient Speculative Decoding", section 4.3.
Medusa's kind learns the tokens of the text (equation 3), EAGLE's kind the target's features and
distributions (equation 4, summed over the group). At depth d (from 1) slot t predicts token
t + 1 + d; it counts there if that token belongs to an answer.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Array, Float, Key

from specjax.models.config import TransformerConfig
from specjax.models.heads.eagle import EagleHead
from specjax.models.heads.parallel import ParallelConfig, ParallelHead, from_eagle
from specjax.training.losses import LossAndMetrics
from specjax.training.objectives.base import HeadTraining, Prediction, Step
from specjax.training.objectives.eagle import FeatureTraining
from specjax.training.objectives.medusa import TokenTraining
from specjax.training.optimizer import OptimizerOptions


@dataclass(frozen=True)
class ParallelTraining(HeadTraining):
    """The shape of a ParallelSpec head, of both kinds."""

    num_masks: int = 4
    """Masks per group (K). A draft is then at most K + 1 tokens deep; Medusa's tree has 4 levels,
    EAGLE's 5, and a dynamic or a tuned one K + 1."""
    num_layers: int = 1
    """Layers of the head; the paper uses 1. With 2, masks can look for what the text repeats."""
    fc_bias: bool = False
    """Give `fc` a bias, where features are read."""

    flags: ClassVar = {"reads_features": "--features", "num_hidden_layers": "--num-layers"}
    adopts: ClassVar = ("eagle",)

    def adopt(self, head: Any, params: Any, key: Key[Array, ""]) -> tuple[Any, Any]:
        """Gives an EAGLE head new masks."""
        if isinstance(head, EagleHead):
            return from_eagle(head, params, self.num_masks, key)
        return head, params

    def parallel_head(
        self, target: TransformerConfig, reads_features: bool, draft_vocab: int = 0
    ) -> ParallelHead:
        """Returns a new head."""
        shape = self.num_masks, reads_features, self.fc_bias
        named = {"num_layers": self.num_layers, "draft_vocab_size": draft_vocab}
        return ParallelHead(ParallelConfig.for_target(target, *shape, **named))

    def group(
        self, head: ParallelHead, params: Any, step: Step, features: Float[Array, "B T F"]
    ) -> list[Prediction]:
        """Runs the head depth by depth; `features` are those it reads of the target's."""
        embedded, predictions, streams = step.embed(1), [], ()
        for depth in range(1, head.config.num_depths + 1):
            predicted, streams = step.run_head(head, params, embedded, features, streams)
            predictions.append(Prediction(depth, predicted))
        return predictions


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
        features = step.features if head.config.reads_features else step.features[..., :0]
        predictions = self.group(head, params, step, features)
        decays = [self.head_decay**masks for masks in range(len(predictions))]
        return self.token_losses(head, step, predictions, decays)


@dataclass(frozen=True)
class ParallelEagleTraining(ParallelTraining, FeatureTraining):
    """Train EAGLE's ParallelSpec: one pass over text and features drafts all tokens."""

    # Table 3 again.
    optimizer: ClassVar[OptimizerOptions] = OptimizerOptions(
        learning_rate=5e-5, weight_decay=0.0, accumulate=4
    )
    epochs: ClassVar = 40.0

    def new_head(self, target: TransformerConfig) -> ParallelHead:
        return self.parallel_head(target, True, self.draft_vocab)

    def step_loss(self, head: ParallelHead, params: Any, step: Step) -> LossAndMetrics:
        predictions = self.group(head, params, step, self.noisy_features(step))
        return self.feature_losses(step, predictions, head.lm_head_rows(step.weights(params)))
