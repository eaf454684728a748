"""EAGLE: a static tree from a head that predicts the target's features (Li et al. 2024)."""

from dataclasses import dataclass
from functools import partial

from specjax.decoding.drafter import Context, Params, Proposal
from specjax.decoding.drafters._heads import HeadDrafter, HeadState
from specjax.decoding.drafters._trees import ChoiceTree, level_tree, levels_of
from specjax.decoding.sampling import Draw
from specjax.decoding.tree import Choices, choices_of
from specjax.models.target import Target

PUBLISHED_TREE = choices_of(  # of EAGLE-1: 25 nodes and the root, in 5 passes of the head
    "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
)


@dataclass(frozen=True)
class Eagle(ChoiceTree, HeadDrafter):
    """EAGLE: a tree of fixed shape, the children of each node its own best tokens.

    Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty". Under
    `rejection` above temperature 0 children are drawn without replacement, as published; otherwise
    they are the best of the logits `with_coupled_noise`.

    `choices` are paths of ranks, as Medusa's, but rank r below a node is that node's r-th token.
    Only nodes with children are fed to the head.
    """

    choices: Choices = PUBLISHED_TREE

    @property
    def num_fed(self) -> int:
        return sum(len(level.fed) for level in levels_of(self.choices))

    def propose(
        self, target: Target, params: Params, state: HeadState, context: Context, draw: Draw
    ) -> tuple[Proposal, HeadState]:
        make_tree = partial(level_tree, self.choices)
        return self.draft_depth_by_depth(make_tree, target, params, state, context, draw)
