"""Hydra: a static tree from heads that know what was drafted above (Ankner et al. 2024).

Each level of the tree is one pass of one head, over the nodes that have children. Only the prefix
layer of Hydra++ has a cache, which holds no drafted tokens.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.decoding.drafter import Context, Params, Proposal
from specjax.decoding.drafters._heads import HeadDrafter, HeadState
from specjax.decoding.drafters._trees import ChoiceTree, level_tree
from specjax.decoding.sampling import Draw
from specjax.models.heads.hydra import HydraHeads
from specjax.models.target import Target


@dataclass(frozen=True)
class Hydra(ChoiceTree, HeadDrafter):
    """Drafts with one head after the other; `params.drafter` is their weights.

    With the root at position r, the target's feature of r - 1 is known (passed through the prefix
    layer, if any). Head d reads it, the embedding of the root and those of the d - 1 tokens drafted
    on the way to a node, and predicts the token at r + d. Children are drawn or chosen as in
    `Eagle`.

    `choices` are paths of ranks, as Medusa's, whose published tree Hydra shares. But rank r below a
    node is that node's own r-th token. Choices deeper than there are heads are left out.
    """

    head: HydraHeads

    @property
    def num_depths(self) -> int:
        return self.head.config.num_heads

    def propose(
        self, target: Target, params: Params, state: HeadState, context: Context, draw: Draw
    ) -> tuple[Proposal, HeadState]:
        weights = self.bind(target, params)
        feature, state = self.catch_up(weights, state, context)

        def logits_below(embedded: Float[Array, "B F K D"], depth: int) -> Float[Array, "B F V"]:
            batch, count = embedded.shape[:2]
            features = jnp.broadcast_to(feature, (batch, count, feature.shape[-1]))
            return self.head.logits_at(weights, depth, features, embedded)

        def feed(embedded, parents: Int[Array, "B F"], tokens: Int[Array, "B F"], depth: int):
            above = jnp.take_along_axis(embedded, parents[..., None, None], axis=1)
            return jnp.concatenate([above, target.embed(params.target, tokens)[:, :, None]], axis=2)

        root = target.embed(params.target, context.root[:, None])[:, :, None]
        tree, _ = level_tree(self.used_choices, context, draw, root, logits_below, feed)
        return Proposal(tree), state
