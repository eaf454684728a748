"""Trees from one distribution per depth, which does not know what was drafted above.

So draft the heads of Medusa and the masks of ParallelSpec: a token is as good below one node as
below another, and all of a tree costs one pass. The static tree is the Cartesian product of the
best tokens of each depth, cut to the `choices`. The dynamic one takes the nodes with the highest
products of probabilities, as EAGLE-2 does.
"""

from dataclasses import dataclass, fields, replace

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from specjax.decoding.drafter import Context
from specjax.decoding.drafters.level_trees import Choices, foreseen, levels_of
from specjax.decoding.drafters.pool_trees import best_of_pool, said_log_probs
from specjax.decoding.sampling import Draw
from specjax.decoding.tree import DraftTree, from_choices, sorted_choices, valid_first
from specjax.errors import SpecjaxError

MEDUSA_TREE: Choices = (  # as published for 7B models: 63 nodes and the root
    *((0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,), (8,), (9,)),
    *((0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (0, 6), (0, 7), (0, 8), (0, 9)),
    *((1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (1, 6), (2, 0), (2, 1), (2, 2)),
    *((3, 0), (3, 1), (4, 0), (5, 0), (6, 0), (7, 0), (8, 0), (9, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 3), (0, 0, 4), (0, 0, 5), (0, 0, 6), (0, 0, 7)),
    *((0, 0, 8), (0, 0, 9), (0, 1, 0), (0, 1, 1), (0, 1, 2), (0, 2, 0), (0, 2, 1), (0, 3, 0)),
    *((0, 4, 0), (0, 5, 0), (0, 6, 0), (0, 7, 0), (1, 0, 0), (1, 0, 1), (2, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1)),
)
ONLY_DYNAMIC = ("top_k", "num_tokens", "depth", "noise_share")  # settings no static tree reads


@dataclass(frozen=True)
class TreeSettings:
    """How a tree is made of the distributions; with a head these make a drafter.

    `tree` is `static`, of the shape of `choices`, paths of ranks; those deeper than the head
    predicts are left out. Or it is `dynamic`: of all paths over the `top_k` best tokens of each
    depth the `num_tokens - 1` most likely nodes (`num_tokens` counts the root), down to `depth` (0:
    as deep as the head predicts), and `noise_share` as in EAGLE-2. It may carry `choices`, which it
    does not read: they may have been tuned for the head.

    Raises:
        SpecjaxError: for choices that are no tree or leave out a rank better than one they have,
            settings by which nothing would be drafted, or a static tree with settings of a dynamic.
    """

    choices: Choices = MEDUSA_TREE
    tree: str = "static"
    top_k: int = 10
    num_tokens: int = 60
    depth: int = 0
    noise_share: float = 0.8

    def __post_init__(self):
        levels_of(self.choices)  # judges them
        if self.tree not in ("static", "dynamic"):
            raise SpecjaxError(f"tree {self.tree!r} is unknown; use static or dynamic")
        for name, least in (("top_k", 1), ("num_tokens", 2), ("depth", 0)):
            if getattr(self, name) < least:
                raise SpecjaxError(f"{name} {getattr(self, name)} must be at least {least}")
        if not 0 <= self.noise_share <= 1:
            raise SpecjaxError(f"noise_share {self.noise_share} is outside [0, 1]; try 0.8")
        self._refuse_unread()

    def _refuse_unread(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if self.tree == "static" and field.name in ONLY_DYNAMIC and value != field.default:
                raise SpecjaxError(
                    f"{field.name} {value} is not read by a static tree; add tree=dynamic, or "
                    f"leave {field.name} out"
                )

    def max_depth(self, depths: int) -> int:
        """The longest path, of a head that predicts so many depths."""
        if self.tree == "static":
            return min(depths, max(map(len, self.choices)))
        return min(depths, self.depth or depths, self.num_tokens - 1)

    def num_nodes(self, depths: int) -> int:
        """Nodes of the tree, root included."""
        if self.tree == "static":
            return len(self._ordered(depths)) + 1
        return min(self.num_tokens, sum(self.pool_sizes(depths)) + 1)

    def width(self) -> int:
        """The most tokens of one depth that are looked at."""
        is_static = self.tree == "static"
        return 1 + max(map(max, self.choices)) if is_static else self.top_k

    def pool_sizes(self, depths: int) -> list[int]:
        """How many nodes of each depth a dynamic tree is chosen from."""
        sizes, above = [], 1
        for _ in range(self.max_depth(depths)):
            sizes.append(above * self.top_k)
            above = min(sizes[-1], self.num_tokens - 1)
        return sizes

    def check(self, vocab_size: int) -> None:
        """Raises SpecjaxError if a node would have more children than there are tokens."""
        if self.width() > vocab_size:
            raise SpecjaxError(
                f"the tree asks for {self.width()} children of one node, but the target has only "
                f"{vocab_size} tokens; lower top_k, or give smaller choices"
            )

    def _ordered(self, depths: int) -> Choices:
        return tuple(choice for choice in set(self.choices) if len(choice) <= depths)


def depth_tree(
    settings: TreeSettings,
    logits: Float[Array, "B D V"],
    context: Context,
    draw: Draw,
) -> DraftTree:
    """The tree below the root, which is the last token of `context`.

    Under `rejection` above temperature 0 the static tree is drawn without replacement at each depth
    (ParallelSpec, algorithm 1). All nodes of one depth then have the same children: only those of
    one of them are ever tried, and nothing that led there depends on them.

    Args:
        settings: of the tree.
        logits: row d - 1 for the tokens at depth d, D at least as deep as the tree.
        context: the committed text.
        draw: how tokens are drawn.
    """
    if settings.tree == "dynamic":
        return _dynamic(settings, logits, context, draw)
    depths = settings.max_depth(logits.shape[1])
    logits = logits[:, :depths]
    choices = settings._ordered(depths)
    ordered, _ = sorted_choices(choices)
    positions = context.length[:, None] + jnp.arange(depths)[None, :]
    law = None
    if draw.sampling.verification == "rejection" and not draw.sampling.is_greedy:
        law = draw.filtered(logits)
        scores = law + draw.noise(positions, law.shape[-1])
    else:
        at = [foreseen(logits[:, d : d + 1], positions[:, d], draw) for d in range(depths)]
        scores = jnp.concatenate(at, axis=1)
    best, ranked = lax.top_k(scores, 1 + max(map(max, ordered)))
    # A node exists where all tokens of its path do: those that filters cut from a law do not.
    exists = best > -jnp.inf
    paths = [[exists[:, d, choice[d]] for d in range(len(choice))] for choice in ordered]
    valid = jnp.stack([jnp.all(jnp.stack(path), axis=0) for path in paths], axis=1)
    tree = from_choices(context.root, ranked, choices)
    proposal = None
    if law is not None:  # row n: the law at the depth below node n; leaves have no children
        below = jnp.minimum(tree.depth, depths - 1)[:, :, None]
        proposal = jnp.take_along_axis(jnp.exp(law), below, axis=1)
    tree = replace(
        tree,
        valid=jnp.pad(valid, ((0, 0), (1, 0)), constant_values=True),
        proposal=proposal,
        is_chain=depths == len(ordered),
    )
    return valid_first(tree)


def _dynamic(
    settings: TreeSettings,
    logits: Float[Array, "B D V"],
    context: Context,
    draw: Draw,
) -> DraftTree:
    """The most likely nodes; their parents are among them, so a beam of their number finds all."""
    batch, top_k = len(logits), settings.top_k
    sizes = settings.pool_sizes(logits.shape[1])
    scores = jnp.zeros((batch, 1))
    place = jnp.full((batch, 1), -1)  # in the pool; -1 is the root
    pool = []  # tokens, scores and parents of each depth
    for depth, size in enumerate(sizes):
        position, count = context.length + depth, scores.shape[1]
        here = logits[:, depth : depth + 1]
        log_probs = said_log_probs(here, position, draw, settings.noise_share)
        own, ranked = lax.top_k(log_probs, top_k)
        own = jnp.broadcast_to(own, (batch, count, top_k))
        below = (scores[:, :, None] + own).reshape(batch, -1)
        tokens = jnp.tile(ranked[:, 0], (1, count))
        pool.append((tokens, below, jnp.repeat(place, top_k, axis=1)))
        scores, chosen = lax.top_k(below, min(size, settings.num_tokens - 1))
        place = chosen + sum(sizes[:depth])
    tokens, scores, parents = (jnp.concatenate(parts, axis=1) for parts in zip(*pool, strict=True))
    pool_depth = np.repeat(np.arange(1, len(sizes) + 1), sizes)
    num_nodes = settings.num_nodes(logits.shape[1])
    return best_of_pool(
        context.root, tokens, scores, parents, pool_depth, num_nodes, is_chain=top_k == 1
    )
