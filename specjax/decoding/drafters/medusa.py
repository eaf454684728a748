"""Medusa: a tree from heads that each predict one depth from the target's last feature.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads".
A tree costs one pass of the heads, and the state is one feature per sequence. Above temperature 0
the published code accepts "typical" tokens and always takes the most likely root, which both change
the text; here the verifier decides, and the root is the sampled token.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.decoding.drafter import Context, Outcome, Params, Proposal, Start
from specjax.decoding.drafters._trees import DepthTreeDrafter
from specjax.decoding.sampling import Draw
from specjax.models.cache import read_slots
from specjax.models.heads import HeadWeights
from specjax.models.heads.medusa import MedusaHeads
from specjax.models.target import Taps, Target

Feature = Float[Array, "B D"]  # the state: the target's, of the last token before the root


@dataclass(frozen=True)
class Medusa(DepthTreeDrafter):
    """Drafts with one pass of the heads a round; `params.drafter` is their weights.

    With the root at position r, the target's feature of r - 1 is known, and head d predicts the
    token at r + d. Heads deeper than the tree are not computed.
    """

    head: MedusaHeads

    taps = Taps(hidden_layers=(-1,), logits=False)  # after the final norm

    @property
    def num_depths(self) -> int:
        return self.head.config.num_heads

    def init(self, start: Start) -> Feature:
        assert start.prefill.hidden is not None
        return read_slots(start.prefill.hidden[:, :, 0], start.prompt.length - 2, 1, axis=1)[:, 0]

    def propose(
        self, target: Target, params: Params, state: Feature, context: Context, draw: Draw
    ) -> tuple[Proposal, Feature]:
        weights = HeadWeights(params.drafter, target, params.target)
        logits = self.head.logits(weights, state, range(1, self.max_depth + 1))
        return Proposal(self.tree_of(logits, context, draw)), state

    def update(self, target: Target, params: Params, state: Feature, outcome: Outcome) -> Feature:
        # The last committed token is the new root; node `count - 1` of the path comes before it.
        assert outcome.output.hidden is not None
        count = outcome.num_committed
        on_path = outcome.along_path(outcome.output.hidden[:, :, 0])
        newest = read_slots(on_path, jnp.maximum(count - 1, 0), 1, axis=1)[:, 0]
        is_running = count > 0  # a finished sequence keeps its root and feature
        return jnp.where(is_running[:, None], newest, state)
