"""Hydra's objective: each head learns the target's distribution at its own depth.

Ankner et al. 2024, "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding", with the loss
of the released code, but without its dropout: cross-entropy to the target's distribution, equally
weighted over heads, which read the text's tokens where drafting gives them drafted ones. Slot t
counts for head d if token t + 1 + d, which it predicts there, belongs to an answer.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.models.cache import KVCache
from specjax.models.config import TransformerConfig
from specjax.models.heads.hydra import HydraConfig, HydraHeads
from specjax.models.heads.training_attention import longest_text, text_before
from specjax.models.target import QueryRows
from specjax.training.blocks import SlotValues
from specjax.training.losses import LossAndMetrics
from specjax.training.objectives.base import HeadTraining, Prediction, Step, Teacher, later
from specjax.training.optimizer import OptimizerOptions


@dataclass(frozen=True)
class HydraTraining(HeadTraining):
    """Train Hydra heads: each knows the tokens drafted before it. They learn the target's
    distribution."""

    num_heads: int = 4
    """Heads, and so tokens of the longest draft."""
    num_layers: int = 4
    """Residual blocks of each head."""
    prefix: bool = False
    """Hydra++: a layer over the whole text prepares what the heads read."""
    lm_heads: bool = True
    """Each head has a separate LM head, as published; with --no-lm-heads all use the target's.
    """

    flags: ClassVar = {"has_lm_heads": "--no-lm-heads", "num_hidden_layers": "--prefix"}
    # The released code's, with EAGLE's number of texts per step (theirs depends on the devices).
    optimizer: ClassVar[OptimizerOptions] = OptimizerOptions(
        learning_rate=5e-4,
        decay="cosine",
        decay_to=0.33,
        beta2=0.999,
        weight_decay=0.1,
        clip="norm",
        clip_at=1.0,
    )
    epochs: ClassVar[float] = 10.0

    def new_head(self, target: TransformerConfig) -> HydraHeads:
        shape = self.prefix, self.num_heads, self.num_layers, self.lm_heads
        return HydraHeads(HydraConfig.for_target(target, *shape))

    def step_loss(self, head: HydraHeads, params: Any, step: Step) -> LossAndMetrics:
        tokens, positions, segments = step.places

        def prefixed(params: Any) -> Float[Array, "B T D"]:
            sizes, dtype, longest = tokens.shape, step.features.dtype, longest_text(positions)
            cache = KVCache.create(head.config.layers, *sizes, dtype=dtype, prompt_length=longest)
            rows = QueryRows(tokens, positions, text_before(segments))
            return head.run(step.weights(params), rows, step.features, cache)[0]

        def values_of(params: Any, at: Prediction, teacher: Teacher) -> SlotValues:
            embedded = [step.target.embed(step.frozen, tokens) for tokens in at.fixed]
            embedded = jnp.stack(embedded, axis=2)
            logits = head.logits_at(step.weights(params), at.ahead, at.inputs, embedded)
            return self.logit_values(logits, teacher.logits)

        prepared = step.checkpoint(prefixed)(params)
        depths = range(1, head.config.num_heads + 1)
        before = [later(tokens, ahead) for ahead in depths]
        predictions = [Prediction(depth, prepared, tuple(before[:depth])) for depth in depths]
        weights = {"logit_loss": 1.0, "top_loss": self.top_weight}
        return step.losses(values_of, predictions, weights, trained=params)
