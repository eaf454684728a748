"""Medusa: a tree from heads that each predict one depth from the target's last feature.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads".
All of a tree costs one pass of the heads, and nothing is kept but one feature per text. The
published acceptance above temperature 0 ("typical") changes what the target says, and so does its
root, which is always the most likely token; here the verifier decides, and the root is what was
sampled.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.decoding.drafter import Context, Outcome, Params, Proposal
from specjax.decoding.drafters._heads import check_head, last_hidden
from specjax.decoding.drafters._trees import TreeSettings, depth_tree
from specjax.decoding.prompt import Prompt
from specjax.decoding.sampling import Draw
from specjax.models.config import TransformerConfig
from specjax.models.heads.medusa import MedusaHeads
from specjax.models.target import ModelOutput, Taps
from specjax.models.transformer import Transformer

Feature = Float[Array, "B D"]  # the state: the target's, of the last token before the root


@dataclass(frozen=True)
class MedusaSettings(TreeSettings):
    """The settings of `medusa` as one writes them; with heads they make a `Medusa`.

    Raises:
        SpecjaxError: see `TreeSettings`.
    """

    def build(self, head: MedusaHeads, target: Transformer) -> "Medusa":
        """The drafter."""
        return Medusa(head, target, self)


@dataclass(frozen=True)
class Medusa:
    """Drafts with one pass of the heads a round; `params.drafter` is their weights.

    With the root at position r, the target's feature of r - 1 is known, and head d says what stands
    at r + d. Heads deeper than the tree are not computed.

    Raises:
        SpecjaxError: if a node has more children than the target has tokens.
    """

    head: MedusaHeads
    target: Transformer  # that the heads were made for
    settings: MedusaSettings = MedusaSettings()

    num_probes = 0

    def __post_init__(self):
        self.settings.check(self.target.config.vocab_size)

    @property
    def taps(self) -> Taps:
        return last_hidden(self.target)

    @property
    def num_nodes(self) -> int:
        return self.settings.num_nodes(self.head.config.num_heads)

    @property
    def max_depth(self) -> int:
        return self.settings.max_depth(self.head.config.num_heads)

    def check(self, config: TransformerConfig, params: Any) -> None:
        check_head(self.head, self.target, config, params)

    def init(self, params: Params, prompt: Prompt, prefill: ModelOutput, num_slots: int) -> Feature:
        assert prefill.hidden is not None
        return _row(prefill.hidden[:, :, 0], prompt.length - 2)

    def propose(
        self, params: Params, state: Feature, context: Context, draw: Draw
    ) -> tuple[Proposal, Feature]:
        logits = self.head.logits(
            params.drafter, self.target, params.target, state, num_depths=self.max_depth
        )
        return Proposal(depth_tree(self.settings, logits, context, draw)), state

    def update(self, params: Params, state: Feature, outcome: Outcome) -> Feature:
        # Committed tokens, not accepted ones: EOS or the room may have cut the path. The last of
        # them is the new root; before it stands the node as deep as the others are many.
        assert outcome.output.hidden is not None
        count = outcome.context.length - 1 - outcome.root_slot
        on_path = outcome.along_path(outcome.output.hidden[:, :, 0])
        is_running = count > 0  # a finished row keeps its root, and the feature before it
        return jnp.where(is_running[:, None], _row(on_path, jnp.maximum(count - 1, 0)), state)


def _row(features: Float[Array, "B T D"], at: Array) -> Feature:
    return jnp.take_along_axis(features, at[:, None, None], axis=1)[:, 0]
