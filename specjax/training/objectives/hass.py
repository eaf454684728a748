"""HASS's objective for an EAGLE head: the contexts of drafting, and the tokens that matter.

Zhang et al. 2025, "Learning Harmonized Representations for Speculative Sampling". *Harmonized
context alignment* (section 3.2): at step n every slot stands for the n-th token of a draft. It
takes the feature that the head predicted at step n - 1, one slot earlier, without its gradient, and
sees the features that a draft of that length would see (`EagleHead.step`). *Harmonized objective
distillation* (section 3.1): cross-entropy over the target's K most likely tokens, beside EAGLE's
losses. The released code leaves masked columns in the softmax; here they are excluded.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.core.ranking import best_token
from specjax.core.settings import setting
from specjax.models.heads.eagle import EagleHead
from specjax.models.heads.layered import DRAFT_TOKENS
from specjax.training.blocks import map_slots
from specjax.training.losses import LossAndMetrics
from specjax.training.objectives.base import Prediction, Step
from specjax.training.objectives.eagle import EagleTraining
from specjax.training.optimizer import OptimizerOptions


@dataclass(frozen=True)
class HassTraining(EagleTraining):
    """Train a head with HASS: in the contexts of drafting, and on the tokens that matter.

    With one alignment step and a top weight of 0 this is EAGLE's training.
    """

    top_weight: float = 1.0
    align_steps: int = setting(3, at_least=1)
    """Steps of harmonized context alignment (n); 1 aligns nothing."""
    step_decay: float = setting(1.0, at_least=0)
    """Weight of each step's loss relative to the step before (beta, Table 5)."""
    token_alignment: float = setting(0.0, at_least=0, at_most=1)
    """Probability that a slot reads the token drafted one step before instead of the text's
    (appendix B)."""

    epochs: ClassVar[float] = 40.0

    def step_loss(self, head: EagleHead, params: Any, step: Step) -> LossAndMetrics:
        # Time grows with `align_steps`, and memory by the keys and values that each step adds.
        embedded = text = step.embed(1)
        features, lm_head = self.noisy_features(step), head.lm_head_rows(step.weights(params))
        streams, predictions = (), []
        for number in range(self.align_steps):
            predicted, streams = step.run_head(head, params, embedded, features, streams)
            predictions.append(Prediction(1, predicted))
            predicted = jax.lax.stop_gradient(predicted)
            # The first slot of a text keeps the target's feature: no draft begins before it.
            is_first = _is_first(step.batch["segments"])[..., None]
            features = jnp.where(is_first, features, jnp.roll(predicted, 1, axis=1))
            if self.token_alignment > 0:
                token = map_slots(lambda x: best_token(step.logits(x, lm_head)), predicted)
                if lm_head is not None:
                    token = params[DRAFT_TOKENS][token]
                drafted = step.target.embed(step.frozen, token)
                key = jax.random.fold_in(step.key, number)
                embedded = self.align_tokens(text, drafted, step.batch["segments"], key)
        decays = [self.step_decay**number for number in range(self.align_steps)]
        return self.feature_losses(step, predictions, lm_head, decays)

    def align_tokens(
        self,
        text: Float[Array, "B T D"],
        drafted: Float[Array, "B T D"],
        segments: Int[Array, "B T"],
        key: Key[Array, ""],
    ) -> Float[Array, "B T D"]:
        """Gives some slots the token that was drafted one slot earlier, the others the text's."""
        is_drafted = jax.random.bernoulli(key, self.token_alignment, segments.shape)
        is_drafted = is_drafted & ~_is_first(segments)
        return jnp.where(is_drafted[..., None], jnp.roll(drafted, 1, axis=1), text)


@dataclass(frozen=True)
class HassFirstStage(HassTraining):
    """Train the first stage of HASS as released: in the contexts of drafting, without Top-K."""

    top_weight: float = 0.0

    optimizer: ClassVar[OptimizerOptions] = OptimizerOptions(accumulate=2)


@dataclass(frozen=True)
class HassSecondStage(HassTraining):
    """Train the second stage of HASS as released: --start is the head of the first."""

    optimizer: ClassVar[OptimizerOptions] = OptimizerOptions(learning_rate=1e-5, accumulate=2)
    epochs: ClassVar[float] = 10.0


def _is_first(segments: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    return (segments != jnp.roll(segments, 1, axis=1)).at[:, 0].set(True)
