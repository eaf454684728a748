"""Hydra: a static tree from heads that know what was drafted above (Ankner et al. 2024).

Each level of the tree is one pass of one head, over the nodes below which there is more to draft;
only the prefix layer of Hydra++ has a cache, which the tree never touches. The published acceptance
above temperature 0 ("typical") changes what the target says, and so does its root, which is always
the most likely token; here the verifier decides, and the root is what was sampled.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.decoding.drafter import Context, Params, Proposal
from specjax.decoding.drafters._heads import HeadDrafter, HeadState
from specjax.decoding.drafters._trees import (
    MEDUSA_TREE,
    Choices,
    Level,
    check_widths,
    level_tree,
    levels_of,
)
from specjax.decoding.sampling import Draw
from specjax.models.heads.eagle import embed
from specjax.models.heads.hydra import HydraHeads
from specjax.models.transformer import Transformer


@dataclass(frozen=True)
class HydraSettings:
    """The settings of `hydra` as one writes them; with heads they make a `Hydra`.

    `choices` are paths of ranks, as Medusa's, whose published tree Hydra shares. But rank r below a
    node is that node's own r-th token. Choices deeper than there are heads are left out.

    Raises:
        SpecjaxError: for choices that are no tree, or leave out a rank better than one they have.
    """

    choices: Choices = MEDUSA_TREE

    def __post_init__(self):
        levels_of(self.choices)  # judges them

    def build(self, head: HydraHeads, target: Transformer) -> "Hydra":
        """The drafter."""
        return Hydra(head, target, self)


@dataclass(frozen=True)
class Hydra(HeadDrafter):
    """Drafts with one head after the other; `params.drafter` is their weights.

    With the root at position r, the target's feature of r - 1 is known, behind the prefix layer if
    there is one. Head d reads it, the embedding of the root and those of the d - 1 tokens drafted
    on the way to a node, and says what stands at r + d. Children are drawn or chosen as `Eagle`'s.

    Raises:
        SpecjaxError: if a node has more children than the target has tokens.
    """

    head: HydraHeads
    settings: HydraSettings = HydraSettings()

    def __post_init__(self):
        check_widths(levels_of(self.choices), self.target.config)

    @property
    def choices(self) -> Choices:
        """Those of the settings for which there are heads."""
        deepest = self.head.config.num_heads
        return tuple(choice for choice in self.settings.choices if len(choice) <= deepest)

    @property
    def num_nodes(self) -> int:
        return len(set(self.choices)) + 1

    @property
    def max_depth(self) -> int:
        return len(levels_of(self.choices))

    @property
    def num_fed(self) -> int:
        return 0  # drafted tokens pass no layer with a cache

    def propose(
        self, params: Params, state: HeadState, context: Context, draw: Draw
    ) -> tuple[Proposal, HeadState]:
        feature, state = self.catch_up(params, state, context)

        def logits_below(embedded: Float[Array, "B F K D"], depth: int) -> Float[Array, "B F V"]:
            batch, count = embedded.shape[:2]
            features = jnp.broadcast_to(feature, (batch, count, feature.shape[-1]))
            return self.head.logits(
                params.drafter, self.target, params.target, depth, features, embedded
            )

        def feed(embedded, level: Level, tokens: Int[Array, "B F"], depth: int):
            own = embed(params.target, tokens)[:, :, None]
            return jnp.concatenate([embedded[:, level.parent[level.fed]], own], axis=2)

        root = embed(params.target, context.root[:, None])[:, :, None]
        tree, _ = level_tree(self.choices, context, draw, root, logits_below, feed)
        return Proposal(tree), state
