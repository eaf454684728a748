"""EAGLE-3's objective: training-time test, on the head's own outputs as in a draft.

Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test". At step n slot t reads the token n places later, and from step 2 on what the
step before returned in its place; it learns the target's distribution of the token after that,
limited to the draft vocabulary. Slots where the target's most likely token is outside of it teach
nothing. Slot t counts at step n if token t + 1 + n is an answer's; the released code divides by all
slots.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

from specjax.core.ranking import best_token
from specjax.core.settings import setting
from specjax.models.config import TransformerConfig
from specjax.models.heads.eagle3 import LOGIT_PARAMS, Eagle3Config, Eagle3Head, TapNorm
from specjax.models.heads.layered import DRAFT_TOKENS
from specjax.training.blocks import SlotValues
from specjax.training.losses import LossAndMetrics, distribution_loss
from specjax.training.objectives.base import HeadTraining, Prediction, Step, Teacher
from specjax.training.optimizer import OptimizerOptions


@dataclass(frozen=True)
class Eagle3Training(HeadTraining):
    """Train an EAGLE-3 head: it reads three of the target's layers, and learns from its own drafts.

    Its LM head starts as the target's.
    """

    draft_vocab: int = setting(32000, at_least=0)
    """Tokens that it can draft, the most frequent in the answers; 0: all."""
    test_steps: int = setting(7, at_least=1)
    """Steps of training-time test; a draft is trained to that depth."""
    step_decay: float = setting(0.8, at_least=0)
    """Weight of each step's loss relative to the step before."""
    tap_norm: TapNorm = "none"
    """Norms of EAGLE-3.1 before `fc`: one for each of the target's layers, or one for all."""
    norm_output: bool = False
    """The output norm of EAGLE-3.1: drafts continue from what the LM head reads."""

    flags: ClassVar = {"draft_vocab_size": "--draft-vocab"}
    optimizer: ClassVar[OptimizerOptions] = OptimizerOptions(
        learning_rate=5e-5, warmup=0.015, weight_decay=0.0, clip="norm", clip_at=0.5, accumulate=2
    )
    epochs: ClassVar[float] = 40.0

    def new_head(self, target: TransformerConfig) -> Eagle3Head:
        norms = {"tap_norm": self.tap_norm, "norm_output": self.norm_output}
        return Eagle3Head(Eagle3Config.for_target(target, self.draft_vocab, **norms))

    def step_loss(self, head: Eagle3Head, params: Any, step: Step) -> LossAndMetrics:
        features, streams, predictions = step.tapped, (), []
        for number in range(1, self.test_steps + 1):
            features, streams = step.run_head(head, params, step.embed(number), features, streams)
            predictions.append(Prediction(number, features))
        drafted = params.get(DRAFT_TOKENS)

        def values_of(lm_params: Any, predicted: Prediction, teacher: Teacher) -> SlotValues:
            logits = head.logits(step.weights(lm_params), predicted.inputs, None)
            best, target_best = best_token(logits), best_token(teacher.logits)
            target_logits, counts = teacher.logits, jnp.ones(best.shape, bool)
            if drafted is not None:
                best, target_logits = drafted[best], teacher.logits[..., drafted]
                is_drafted = jnp.zeros(teacher.logits.shape[-1], bool).at[drafted].set(True)
                counts = is_drafted[target_best]
            loss = distribution_loss(self.distribution_loss, logits, teacher.logits, drafted)
            losses = {"logit_loss": loss, **self.top_values(logits, target_logits)}
            losses = {name: jnp.where(counts, loss, 0.0) for name, loss in losses.items()}
            return losses | {"is_right": best == target_best}

        lm_params = {name: params[name] for name in LOGIT_PARAMS}
        decays = [self.step_decay**number for number in range(self.test_steps)]
        weights = {"logit_loss": 1.0, "top_loss": self.top_weight}
        return step.losses(values_of, predictions, weights, decays, lm_params)
