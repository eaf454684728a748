"""ParallelSpec: a whole tree from one pass of a head that reads masks (Xiao et al. 2024)."""

from dataclasses import dataclass

from specjax.decoding.drafter import Context, Params, Proposal
from specjax.decoding.drafters._heads import HeadDrafter, HeadState
from specjax.decoding.drafters._trees import MEDUSA_TREE, DepthTreeDrafter
from specjax.decoding.drafters.eagle import PUBLISHED_TREE
from specjax.decoding.sampling import Draw
from specjax.decoding.tree import Choices
from specjax.models.heads.parallel import ParallelHead
from specjax.models.target import Target


@dataclass(frozen=True)
class ParallelSpec(DepthTreeDrafter, HeadDrafter):
    """Drafts with one pass of the head per round; EAGLE's tree.

    Xiao et al. 2024, "ParallelSpec: Parallel Drafter for Efficient Speculative Decoding", algorithm
    1. The pass reads what the last round committed, followed by as many masks as the tree is
    deep, less one: the last committed token and each mask predict the token at one depth. A mask's
    keys and values are dropped after the round.
    """

    head: ParallelHead
    choices: Choices = PUBLISHED_TREE

    @property
    def num_depths(self) -> int:
        return self.head.config.num_depths

    @property
    def num_fed(self) -> int:
        return self.max_depth - 1

    def propose(
        self, target: Target, params: Params, state: HeadState, context: Context, draw: Draw
    ) -> tuple[Proposal, HeadState]:
        weights, draw = self.bind(target, params), self.restrict(draw, params)
        features, state = self.catch_up(weights, state, context, num_masks=self.num_fed)
        logits = self.head.logits(weights, features, state.lm_head)
        return Proposal(self.tree_of(logits, context, draw)), state


@dataclass(frozen=True)
class ParallelSpecMedusa(ParallelSpec):
    """The same with Medusa's tree, for heads that replace Medusa's."""

    choices: Choices = MEDUSA_TREE
