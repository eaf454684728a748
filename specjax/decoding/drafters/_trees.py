"""Trees that several drafters build.

- `level_tree`: a static tree whose nodes' children are each node's own best tokens.
- `DepthTreeDrafter`: from one distribution per depth, which does not know what was drafted above;
  static or dynamic.
- `best_of_pool`: the likeliest among many drafted nodes.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.core.errors import SpecjaxError, check_at_least
from specjax.core.ranking import best_tokens
from specjax.decoding.drafter import Context, Drafter
from specjax.decoding.drafters._heads import check_head
from specjax.decoding.sampling import Draw
from specjax.decoding.tree import DraftTree, from_choices, sorted_choices, valid_first
from specjax.models.target import Target

Choices = tuple[tuple[int, ...], ...]
Nodes = TypeVar("Nodes")

# Penalty, in nats, for a token that the target's filters would cut from the head's own
# distribution. The target may still keep it: removing it hurts lower-ranked guesses, not penalising
# it hurts the first. On random pairs of target and draft, 2 nats came close to the best for both.
CUT_PENALTY = 2.0


class Level(NamedTuple):
    """The n nodes of one depth of a static tree, and the f of them that have children.

    Nodes with children are fed to the head, to draft at the next depth. C: those fed so far.
    """

    parent: np.ndarray  # [n]: which of the nodes fed one depth above
    rank: np.ndarray  # [n]: among the tokens after the parent
    width: int  # the most children of one parent
    fed: np.ndarray  # [f]: which of the n
    visible: np.ndarray  # [f, C]: ancestors of a fed node and itself, among those fed so far


@cache
def levels_of(choices: Choices) -> tuple[Level, ...]:
    """Returns the plan by which a static tree is drafted, by depth.

    Raises:
        SpecjaxError: for no choices, choices that do not form a tree, or a choice that leaves out a
            rank better than its own.
    """
    ordered, _ = sorted_choices(choices)
    if not ordered:
        raise SpecjaxError("there are no tree choices: nothing would be drafted; write some")
    for choice in ordered:
        better = (*choice[:-1], choice[-1] - 1)
        if choice[-1] > 0 and better not in ordered:
            raise SpecjaxError(
                f"tree choice {choice} leaves out its better sibling; add {better} to the choices"
            )
    levels: list[Level] = []
    above: Choices = ((),)
    seen: Choices = ()
    for depth in range(1, len(ordered[-1]) + 1):
        level = tuple(choice for choice in ordered if len(choice) == depth)
        fed = tuple(choice for choice in level if (*choice, 0) in ordered)
        seen = seen + fed
        levels.append(
            Level(
                parent=np.array([above.index(choice[:-1]) for choice in level]),
                rank=np.array([choice[-1] for choice in level]),
                width=1 + max(choice[-1] for choice in level),
                fed=np.array([level.index(choice) for choice in fed], int),
                visible=np.array([[node[: len(at)] == at for at in seen] for node in fed], bool),
            )
        )
        above = fed
    return tuple(levels)


def check_widths(choices: Choices, num_drafted: int) -> None:
    """Raises SpecjaxError if a node has more children than the head has tokens."""
    widest = max(level.width for level in levels_of(choices))
    if widest > num_drafted:
        raise SpecjaxError(
            f"the tree choices ask for {widest} children of one node, but the head drafts only "
            f"{num_drafted} tokens; ask for fewer"
        )


def level_tree(
    choices: Choices,
    context: Context,
    draw: Draw,
    root: Nodes,
    logits_below: Callable[[Nodes, int], Float[Array, "B F V"]],
    feed: Callable[[Nodes, Level, Int[Array, "B F"], int], Nodes],
) -> tuple[DraftTree, Nodes]:
    """Drafts a static tree level by level; a node's children are its own best tokens.

    Under `rejection` above temperature 0 children are drawn without replacement, otherwise they are
    the best of the logits `with_coupled_noise`.

    Args:
        choices: the nodes as paths of ranks; see `levels_of`.
        context: the committed text; the root is its last token.
        draw: temperature, filters and noise.
        root: what the head knows of the root, in the form of the F nodes of any depth.
        logits_below: from such nodes to the logits of their children at a depth, counted from 1.
        feed: from such nodes to those of the next level that are `fed`, given with their tokens and
            their depth.

    Returns:
        The tree, and the last result of `feed`.
    """
    levels, nodes = levels_of(choices), root
    tokens, level_probs = [context.root[:, None]], []
    is_real = jnp.ones_like(tokens[0], bool)  # of the nodes to draft below
    valid = [is_real]
    for depth, level in enumerate(levels, start=1):
        logits, position = logits_below(nodes, depth), context.length + depth - 1
        if draw.sampling.needs_draft_probs:
            log_probs = draw.filtered(logits)
            scores = log_probs + draw.noise(position[:, None], log_probs.shape[-1])
            level_probs.append(draw.spread(jnp.exp(log_probs)))
        else:
            scores = with_coupled_noise(logits, position, draw)
        best, ranked = best_tokens(scores, level.width)
        tokens.append(draw.tokens(ranked)[:, level.parent, level.rank])
        exists = best[:, level.parent, level.rank] > -jnp.inf
        valid.append(exists & is_real[:, level.parent])
        if len(level.fed) == 0:
            break
        is_real = valid[-1][:, level.fed]
        nodes = feed(nodes, level, tokens[-1][:, level.fed], depth)
    return _joined(choices, tokens, valid, level_probs), nodes


def _joined(
    choices: Choices, tokens: list[Array], valid: list[Array], level_probs: list[Array]
) -> DraftTree:
    """Returns the tree of the nodes and level_probs of each level, the root first."""
    ordered, parents = sorted_choices(choices)
    depth = np.array([0] + [len(choice) for choice in ordered])
    drafted = jnp.concatenate(tokens, axis=1)
    draft_probs = None
    if level_probs:
        drawn_from = jnp.concatenate(level_probs, axis=1)
        with_children = np.unique(parents[1:])  # the root and what was fed, in order
        nothing = jnp.zeros((*drafted.shape, drawn_from.shape[-1]))
        draft_probs = nothing.at[:, with_children].set(drawn_from)
    tree = DraftTree(
        tokens=drafted,
        parents=jnp.broadcast_to(parents, drafted.shape),
        depth=jnp.broadcast_to(depth, drafted.shape),
        valid=jnp.concatenate(valid, axis=1),
        draft_probs=draft_probs,
        is_chain=len(levels_of(choices)) == len(ordered),
    )
    return valid_first(tree)


def with_coupled_noise(
    logits: Float[Array, "B F V"], position: Int[Array, " B"], draw: Draw
) -> Float[Array, "B F V"]:
    """Adds to the logits the noise with which the target will draw its token at `position`.

    At temperature T the target's token is the argmax of `l + T g`, with its own logits l and noise
    g that depends on the position alone; it never draws tokens that its filters cut. Here the
    drafter's logits stand in for the target's. They are returned unchanged where the noise does not
    decide, or must not be known: see `Sampling.noise_is_known`.
    """
    sampling, logits = draw.sampling, logits.astype(jnp.float32)
    if not sampling.noise_is_known:
        return logits
    noise = draw.noise(position[:, None], logits.shape[-1])
    penalty = jnp.where(draw.filtered(logits) > -jnp.inf, 0.0, CUT_PENALTY)
    return logits + sampling.temperature * (noise - penalty)


def most_likely(
    logits: Float[Array, "B F V"],
    position: Int[Array, " B"],
    draw: Draw,
    noise_share: float,
    k: int,
) -> tuple[Float[Array, "B F K"], Int[Array, "B F K"]]:
    """Returns the k tokens that the target is likeliest to draw at `position`: see `Eagle2`.

    Their log-probabilities come first.
    """
    logits = logits.astype(jnp.float32)
    if noise_share == 0 or not draw.sampling.noise_is_known:
        best, ranked = best_tokens(logits, k)
        best = best - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        return best, draw.tokens(ranked)
    log_probs = jax.nn.log_softmax(with_coupled_noise(logits, position, draw), axis=-1)
    if noise_share < 1:
        without = jax.nn.log_softmax(logits, axis=-1) + math.log(1 - noise_share)
        log_probs = jnp.logaddexp(log_probs + math.log(noise_share), without)
        log_probs = jnp.minimum(log_probs, 0)  # rounding must not put a node above its parent
    best, ranked = best_tokens(log_probs, k)
    return best, draw.tokens(ranked)


def best_of_pool(
    root: Int[Array, " B"],
    tokens: Int[Array, "B S"],
    scores: Float[Array, "B S"],
    parents: Int[Array, "B S"],
    pool_depth: np.ndarray | Int[Array, "B S"],
    num_nodes: int,
    is_chain: bool,
) -> DraftTree:
    """Returns the tree of the root and the best of the S nodes of a pool, in the pool's order.

    Args:
        root: the last committed token.
        tokens: the pool's tokens; parents come before their children.
        scores: log-probabilities of the nodes' paths, -inf for nodes that do not exist.
        parents: places in the pool, -1 for the root.
        pool_depth: `[S]` or `[B, S]`, the depth of each node.
        num_nodes: nodes of the tree, root included.
        is_chain: whether the pool is one path.
    """
    kept = jnp.sort(lax.top_k(scores, num_nodes - 1)[1], axis=1)
    of_kept = lambda values: jnp.take_along_axis(values, kept, axis=1)  # noqa: E731
    # Kept nodes are numbered from 1 in pool order; a parent's number counts the kept up to it.
    parents = jnp.sum(kept[:, None, :] <= of_kept(parents)[:, :, None], axis=2)
    with_root = lambda first, values: jnp.concatenate([first, values], axis=1)  # noqa: E731
    first = jnp.zeros_like(kept[:, :1])
    tree = DraftTree(
        tokens=with_root(root[:, None], of_kept(tokens)),
        parents=with_root(first - 1, parents),
        depth=with_root(first, of_kept(jnp.broadcast_to(pool_depth, scores.shape))),
        valid=with_root(first == 0, of_kept(scores) > -jnp.inf),
        scores=with_root(jnp.zeros(first.shape), of_kept(scores)),
        is_chain=is_chain,
    )
    return valid_first(tree)


# ---- One distribution per depth ----------------------------------------------------------------

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
class DepthTreeDrafter(Drafter):
    """Makes a tree of one distribution per depth, which does not know what was drafted above.

    A token is as good below one node as below another, and the whole tree costs one pass.

    `tree` is `static`, of the shape of `choices`, paths of ranks: the Cartesian product of the best
    tokens of each depth, cut to the choices; those deeper than the head predicts are left out. Or
    it is `dynamic`: of all paths over the `top_k` best tokens of each depth the `num_tokens - 1`
    most likely nodes (`num_tokens` counts the root), down to `depth` (0: as deep as the head
    predicts), and `noise_share` as in EAGLE-2. It may carry `choices`, which it does not read: they
    may have been tuned for the head.

    Raises:
        SpecjaxError: for choices that do not form a tree or leave out a rank better than one they
            have, settings by which nothing would be drafted, or a static tree with settings that
            only a dynamic tree reads.
    """

    head: Any
    choices: Choices = MEDUSA_TREE
    """Paths of the static tree, as ranks ((0,), (0, 0), ...); each comes with its parent."""
    tree: str = "static"
    """static, the tree of choices, or dynamic, which alone reads the settings below."""
    top_k: int = 10
    """Tokens per depth that a dynamic tree is made of; at least 1."""
    num_tokens: int = 60
    """Nodes of a dynamic tree, root included; at least 2."""
    depth: int = 0
    """Depth of a dynamic tree; 0 is as deep as the head predicts."""
    noise_share: float = 0.8
    """Weight, above temperature 0, of what the target's noise makes likely; 0 to 1."""

    row_widths = ()  # a draft always fills the tree

    def __post_init__(self):
        levels_of(self.choices)  # checks them
        if self.tree not in ("static", "dynamic"):
            raise SpecjaxError(f"tree {self.tree!r} is unknown; use static or dynamic")
        for name, least in (("top_k", 1), ("num_tokens", 2), ("depth", 0)):
            check_at_least(name, getattr(self, name), least)
        if not 0 <= self.noise_share <= 1:
            raise SpecjaxError(f"noise_share {self.noise_share} is outside [0, 1]; try 0.8")
        for field in fields(self):
            value = getattr(self, field.name)
            if self.tree == "static" and field.name in ONLY_DYNAMIC and value != field.default:
                raise SpecjaxError(
                    f"{field.name} {value} is not read by a static tree; add tree=dynamic, or "
                    f"leave {field.name} out"
                )

    @property
    @abstractmethod
    def num_depths(self) -> int:
        """The depths that the head predicts."""

    @property
    def max_depth(self) -> int:
        if self.tree == "static":
            return min(self.num_depths, max(map(len, self.choices)))
        return min(self.num_depths, self.depth or self.num_depths, self.num_tokens - 1)

    @property
    def num_nodes(self) -> int:
        if self.tree == "static":
            return len(self.used_choices) + 1
        return min(self.num_tokens, sum(self.pool_sizes) + 1)

    @property
    def used_choices(self) -> Choices:
        """The choices of a static tree that are no deeper than the head predicts."""
        return tuple(choice for choice in set(self.choices) if len(choice) <= self.num_depths)

    @property
    def pool_sizes(self) -> list[int]:
        """The nodes of each depth that a dynamic tree is chosen from."""
        sizes, above = [], 1
        for _ in range(self.max_depth):
            sizes.append(above * self.top_k)
            above = min(sizes[-1], self.num_tokens - 1)
        return sizes

    def check(self, target: Target, params: Any) -> None:
        check_head(self.head, target, params)
        width, num_drafted = self.top_k, self.head.config.num_drafted
        if self.tree == "static":
            width = 1 + max(map(max, self.choices))
        if width > num_drafted:
            raise SpecjaxError(
                f"the tree asks for {width} children of one node, but the head drafts only "
                f"{num_drafted} tokens; lower top_k, or give smaller choices"
            )

    def tree_of(self, logits: Float[Array, "B D V"], context: Context, draw: Draw) -> DraftTree:
        """Makes the tree below the root, which is the last token of `context`.

        Under `rejection` above temperature 0 the static tree is drawn without replacement at each
        depth (ParallelSpec, algorithm 1). All nodes of one depth then have the same children: only
        those of one of them are ever tried, and nothing that led there depends on them.

        Args:
            logits: row d - 1 for the tokens at depth d, D at least as deep as the tree.
            context: the committed text.
            draw: temperature, filters and noise.
        """
        return (self._static if self.tree == "static" else self._dynamic)(logits, context, draw)

    def _static(self, logits: Float[Array, "B D V"], context: Context, draw: Draw) -> DraftTree:
        depths, choices = self.max_depth, self.used_choices
        logits = logits[:, :depths]
        ordered, _ = sorted_choices(choices)
        positions = context.length[:, None] + jnp.arange(depths)[None, :]
        log_probs = None
        if draw.sampling.needs_draft_probs:
            log_probs = draw.filtered(logits)
            scores = log_probs + draw.noise(positions, log_probs.shape[-1])
        else:
            at = [
                with_coupled_noise(logits[:, d : d + 1], positions[:, d], draw)
                for d in range(depths)
            ]
            scores = jnp.concatenate(at, axis=1)
        best, ranked = best_tokens(scores, 1 + max(map(max, ordered)))
        # A node exists where all tokens of its path do: those that filters cut do not.
        exists = best > -jnp.inf
        paths = [[exists[:, d, choice[d]] for d in range(len(choice))] for choice in ordered]
        valid = jnp.stack([jnp.all(jnp.stack(path), axis=0) for path in paths], axis=1)
        tree = from_choices(context.root, draw.tokens(ranked), choices)
        draft_probs = None
        if log_probs is not None:  # row n: what was drawn from below node n; leaves have none
            below = jnp.minimum(tree.depth, depths - 1)[:, :, None]
            draft_probs = jnp.take_along_axis(draw.spread(jnp.exp(log_probs)), below, axis=1)
        tree = replace(
            tree,
            valid=jnp.pad(valid, ((0, 0), (1, 0)), constant_values=True),
            draft_probs=draft_probs,
            is_chain=depths == len(ordered),
        )
        return valid_first(tree)

    def _dynamic(self, logits: Float[Array, "B D V"], context: Context, draw: Draw) -> DraftTree:
        """Takes the most likely nodes; a beam as wide as the tree finds them with their parents."""
        batch, top_k, sizes = len(logits), self.top_k, self.pool_sizes
        scores = jnp.zeros((batch, 1))
        place = jnp.full((batch, 1), -1)  # in the pool; -1 is the root
        pool = []  # tokens, scores and parents of each depth
        for depth, size in enumerate(sizes):
            position, count = context.length + depth, scores.shape[1]
            here = logits[:, depth : depth + 1]
            own, best = most_likely(here, position, draw, self.noise_share, top_k)
            own = jnp.broadcast_to(own, (batch, count, top_k))
            below = (scores[:, :, None] + own).reshape(batch, -1)
            tokens = jnp.tile(best[:, 0], (1, count))
            pool.append((tokens, below, jnp.repeat(place, top_k, axis=1)))
            scores, chosen = lax.top_k(below, min(size, self.num_tokens - 1))
            place = chosen + sum(sizes[:depth])
        tokens, scores, parents = (
            jnp.concatenate(parts, axis=1) for parts in zip(*pool, strict=True)
        )
        pool_depth = np.repeat(np.arange(1, len(sizes) + 1), sizes)
        return best_of_pool(
            context.root, tokens, scores, parents, pool_depth, self.num_nodes, is_chain=top_k == 1
        )
