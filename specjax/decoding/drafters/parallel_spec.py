"""ParallelSpec: a whole tree from one pass of a head that reads masks (Xiao et al. 2024)."""

from dataclasses import dataclass

from specjax.decoding.drafter import Context, Params, Proposal
from specjax.decoding.drafters._heads import HeadDrafter, HeadState
from specjax.decoding.drafters._trees import MEDUSA_TREE, Choices, TreeSettings, depth_tree
from specjax.decoding.drafters.eagle import PUBLISHED_TREE
from specjax.decoding.sampling import Draw
from specjax.models.heads.parallel import ParallelHead
from specjax.models.transformer import Transformer


@dataclass(frozen=True)
class ParallelSettings(TreeSettings):
    """The settings of `parallel-eagle` as one writes them; with a head they make a `ParallelSpec`.

    Raises:
        SpecjaxError: see `TreeSettings`.
    """

    choices: Choices = PUBLISHED_TREE

    def build(self, head: ParallelHead, target: Transformer) -> "ParallelSpec":
        """The drafter."""
        return ParallelSpec(head, target, self)


@dataclass(frozen=True)
class ParallelMedusaSettings(ParallelSettings):
    """The settings of `parallel-medusa`: Medusa's tree.

    Raises:
        SpecjaxError: see `TreeSettings`.
    """

    choices: Choices = MEDUSA_TREE


@dataclass(frozen=True)
class ParallelSpec(HeadDrafter):
    """Drafts with one pass of the head a round, whichever kind of head it is.

    Xiao et al. 2024, "ParallelSpec: Parallel Drafter for Efficient Speculative Decoding", algorithm
    1. The pass reads what the last round committed and, behind it, as many masks as the tree is
    deep, less one: the last committed token and each mask say what stands at one depth. A mask's
    keys and values are forgotten after the round.

    Raises:
        SpecjaxError: if a node has more children than the target has tokens.
    """

    head: ParallelHead
    settings: ParallelSettings = ParallelSettings()

    def __post_init__(self):
        self.settings.check(self.target.config.vocab_size)

    @property
    def reads_features(self) -> bool:
        return self.head.config.reads_features

    @property
    def num_nodes(self) -> int:
        return self.settings.num_nodes(self.head.config.num_depths)

    @property
    def max_depth(self) -> int:
        return self.settings.max_depth(self.head.config.num_depths)

    @property
    def num_fed(self) -> int:
        return self.max_depth - 1

    def propose(
        self, params: Params, state: HeadState, context: Context, draw: Draw
    ) -> tuple[Proposal, HeadState]:
        features, state = self.catch_up(params, state, context, num_masks=self.num_fed)
        logits = self.target.logits(params.target, features)
        return Proposal(depth_tree(self.settings, logits, context, draw)), state
