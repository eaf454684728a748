"""Trees of one distribution per depth, static or dynamic, as Medusa and ParallelSpec draft them."""

from dataclasses import dataclass, fields

from jaxtyping import Array, Float

from specjax.core.settings import SettingError, setting
from specjax.decoding.drafter import Context
from specjax.decoding.drafters._trees import (
    ChoiceTree,
    beam_tree,
    level_tree,
    pool_sizes,
)
from specjax.decoding.sampling import Draw
from specjax.decoding.tree import DraftTree

ONLY_DYNAMIC = ("top_k", "num_tokens", "depth", "noise_share")  # not read by a static tree


@dataclass(frozen=True)
class DepthTreeDrafter(ChoiceTree):
    """Makes a tree of one distribution per depth, whatever was drafted above; it costs one pass.

    A `static` tree has the shape of `choices`, paths of ranks: the Cartesian product of the best
    tokens of each depth, cut to the choices; those deeper than the head predicts are left out. A
    `dynamic` tree holds, of all paths over the `top_k` best tokens of each depth, the most likely
    `num_tokens - 1` nodes (`num_tokens` counts the root), down to `depth` (0: as deep as the head
    predicts), with `noise_share` as in EAGLE-2. It ignores `choices`, which may be tuned ones.
    """

    tree: str = setting("static", choices=("static", "dynamic"))
    """The tree of choices, or a dynamic tree with the settings below."""
    top_k: int = setting(10, at_least=1)
    """Tokens per depth that a dynamic tree is made of."""
    num_tokens: int = setting(60, at_least=2)
    """Nodes of a dynamic tree, root included."""
    depth: int = setting(0, at_least=0)
    """Depth of a dynamic tree; 0 is as deep as the head predicts."""
    noise_share: float = setting(0.8, at_least=0, at_most=1)
    """Weight, above temperature 0, of the distribution with the target's noise."""

    def check_settings(self) -> None:
        super().check_settings()
        for field in fields(self) if self.tree == "static" else ():
            if field.name in ONLY_DYNAMIC and getattr(self, field.name) != field.default:
                problem = "has no effect on a static tree; add tree=dynamic, or omit it"
                raise SettingError(field.name, problem)

    @property
    def max_depth(self) -> int:
        if self.tree == "static":
            return super().max_depth
        return min(self.num_depths, self.depth or self.num_depths, self.num_tokens - 1)

    @property
    def num_nodes(self) -> int:
        if self.tree == "static":
            return super().num_nodes
        return min(self.num_tokens, sum(self.pool_sizes) + 1)

    @property
    def pool_sizes(self) -> list[int]:
        """The nodes of each depth that a dynamic tree is chosen from."""
        return pool_sizes(self.max_depth, self.top_k, self.num_tokens - 1)

    @property
    def max_children(self) -> int:
        return super().max_children if self.tree == "static" else self.top_k

    def tree_of(self, logits: Float[Array, "B D V"], context: Context, draw: Draw) -> DraftTree:
        """Makes the tree below the root from logits of its depths, `logits[:, 0]` at depth 1.

        Under `rejection` above temperature 0 the static tree is drawn without replacement at each
        depth (ParallelSpec, algorithm 1). All nodes of one depth then have the same children: only
        those of one of them are ever tried, and nothing that led there depends on them. The beam of
        a dynamic tree is as wide as the tree, so that it finds the most likely nodes.
        """

        def logits_below(_: None, depth: int) -> Float[Array, "B 1 V"]:
            return logits[:, depth - 1 : depth]

        if self.tree == "static":
            return level_tree(self.used_choices, context, draw, None, logits_below)[0]
        return beam_tree(
            context,
            draw,
            None,
            logits_below,
            lambda *_: None,
            self.pool_sizes,
            self.num_tokens - 1,
            self.num_nodes,
            self.noise_share,
        )[0]
