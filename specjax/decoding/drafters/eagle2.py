"""EAGLE-2: a tree that grows where the head is confident (Li et al. 2024). HASS drafts with it."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from specjax.core.settings import setting
from specjax.decoding.drafter import Context, Params, Proposal
from specjax.decoding.drafters._heads import HeadDrafter, HeadState, check_head
from specjax.decoding.drafters._trees import Beam, beam_tree
from specjax.decoding.sampling import Draw
from specjax.models.target import Target


@dataclass(frozen=True)
class Eagle2(HeadDrafter):
    """EAGLE-2: the best nodes of a beam search, by the product of the head's probabilities.

    Li et al. 2024, "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees". The
    pool is all nodes that were drafted, in that order: `top_k` below the root, then `top_k` below
    each of the `top_k` best of the depth above. The `num_tokens - 1` best by score are verified;
    ties go to the earlier, so parents come with their children.

    What differs from the published code: scores are float32, and above temperature 0, under
    `coupled`, a tree grows along what the target will draw, not only along what it might. The
    probability of a token is modelled as a mixture: with weight `noise_share` the softmax of the
    head's logits `with_coupled_noise`, which fits where the target is as unsure as the head and the
    noise decides; otherwise the head's own softmax, which fits where the target is sure. Nodes are
    chosen, not drawn: under `rejection` each counts as drawn with certainty.

    Defaults are the published ones, except `noise_share`, which as published would be 0.
    """

    top_k: int = setting(10, at_least=1)
    """Children per node, and nodes per depth that have any."""
    depth: int = setting(6, at_least=1)
    """Tokens of the longest path, as in HASS's paper. `depth` of the authors' code counts passes
    after the first, so it is one less."""
    num_tokens: int = setting(60, at_least=2)
    """Nodes to verify, root included."""
    noise_share: float = setting(0.8, at_least=0, at_most=1)
    """Weight, above temperature 0, of the distribution with the target's noise."""

    def check(self, target: Target, params: Any) -> None:
        check_head(self.head, target, params, self.top_k)

    @property
    def beam(self) -> Beam:
        """The search for the tree."""
        return Beam(self.max_depth, self.top_k, self.top_k, self.num_tokens, self.noise_share)

    @property
    def num_nodes(self) -> int:
        return self.beam.num_nodes

    @property
    def max_depth(self) -> int:
        return min(self.depth, self.num_tokens - 1)

    @property
    def num_fed(self) -> int:
        return self.top_k * (self.max_depth - 1)

    def propose(
        self, target: Target, params: Params, state: HeadState, context: Context, draw: Draw
    ) -> tuple[Proposal, HeadState]:
        make_tree = partial(beam_tree, self.beam)
        return self.draft_depth_by_depth(make_tree, target, params, state, context, draw)
