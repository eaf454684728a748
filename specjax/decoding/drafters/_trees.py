"""The trees that drafters build: static ones level by level, dynamic ones by a beam search."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.core.errors import SpecjaxError
from specjax.core.ranking import best_tokens
from specjax.core.settings import SettingError, setting
from specjax.decoding.drafter import Context, Drafter
from specjax.decoding.drafters._heads import check_head
from specjax.decoding.sampling import Draw
from specjax.decoding.tree import Choices, DraftTree, choices_of, sorted_choices, valid_first
from specjax.models.target import Target

Values = TypeVar("Values")


MEDUSA_TREE = choices_of(  # as published for 7B models: 63 nodes and the root
    """
    0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 30 31 40 50 60
    70 80 90 000 001 002 003 004 005 006 007 008 009 010 011 012 020 021 030 040 050 060 070 100
    101 200 0000 0001
    """
)
ONLY_DYNAMIC = ("top_k", "num_tokens", "depth", "noise_share")  # not read by a static tree

# Penalty, in nats, for a token that the target's filters cut from the head's distribution. The
# target may still keep it: removing it hurts lower-ranked guesses, no penalty hurts the first. On
# random pairs of target and draft, 2 nats were close to the best for both.
CUT_PENALTY = 2.0


class Level(NamedTuple):
    """The n nodes of one depth of a static tree, and the f of them that have children.

    Nodes with children are fed to the head, to draft at the next depth.
    """

    parent: np.ndarray  # [n]: which of the nodes fed one depth above
    rank: np.ndarray  # [n]: among the tokens after the parent
    width: int  # the most children of one parent
    fed: np.ndarray  # [f]: which of the n


@cache
def levels_of(choices: Choices) -> tuple[Level, ...]:
    """Returns the levels of a static tree, by depth."""
    ordered, _ = sorted_choices(choices)
    if not ordered:
        raise SpecjaxError("there are no tree choices; add some, such as (0,)")
    for choice in ordered:
        better = (*choice[:-1], choice[-1] - 1)
        if choice[-1] > 0 and better not in ordered:
            raise SpecjaxError(
                f"tree choice {choice} leaves out its better sibling; add {better} to the choices"
            )
    levels: list[Level] = []
    above: Choices = ((),)
    for depth in range(1, len(ordered[-1]) + 1):
        level = tuple(choice for choice in ordered if len(choice) == depth)
        fed = tuple(choice for choice in level if (*choice, 0) in ordered)
        levels.append(
            Level(
                parent=np.array([above.index(choice[:-1]) for choice in level]),
                rank=np.array([choice[-1] for choice in level]),
                width=1 + max(choice[-1] for choice in level),
                fed=np.array([level.index(choice) for choice in fed], int),
            )
        )
        above = fed
    return tuple(levels)


@dataclass(frozen=True)
class ChoiceTree(Drafter):
    """Drafts with a head, by default a static tree; paths deeper than it predicts are left out."""

    head: Any
    choices: Choices = MEDUSA_TREE
    """Paths of the static tree, as ranks ((0,), (0, 0), ...); each comes with its parent."""

    pass_widths = ()  # a draft always fills the tree

    def check_settings(self) -> None:
        levels_of(self.choices)  # checks them

    @property
    def num_depths(self) -> int:
        """The depths that the head predicts."""
        return max(map(len, self.choices))

    @property
    def used_choices(self) -> Choices:
        """The choices within the depth that the head predicts."""
        return tuple(choice for choice in set(self.choices) if len(choice) <= self.num_depths)

    @property
    def num_nodes(self) -> int:
        return len(self.used_choices) + 1

    @property
    def max_depth(self) -> int:
        return max(map(len, self.used_choices))

    @property
    def max_children(self) -> int:
        """The most children of one node."""
        return 1 + max(map(max, self.used_choices))

    def check(self, target: Target, params: Any) -> None:
        check_head(self.head, target, params, self.max_children)


def level_tree(
    choices: Choices,
    context: Context,
    draw: Draw,
    root: Values,
    logits_below: Callable[[Values, int], Float[Array, "B F V"]],
    feed: Callable[..., Values] = lambda nodes, *_: nodes,
) -> tuple[DraftTree, Values]:
    """Drafts a static tree level by level; a node's children are its own best tokens.

    Under `rejection` above temperature 0 children are drawn without replacement, otherwise they are
    the best of the logits `with_coupled_noise`.

    `root`, and what `feed` returns, are the head's values at the nodes of one depth that have
    children. `feed` takes such values, the places among these nodes of the parents of the next
    ones, `[B, F]`, the tokens of these and their depth; `logits_below` takes such values and the
    depth of the children, from 1. It may return logits that all these nodes share, `[B, 1, V]`.
    Returns the tree, and the values that were fed last.
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
            probs = draw.over_vocabulary(jnp.exp(log_probs))
            level_probs.append(jnp.broadcast_to(probs, (*is_real.shape, probs.shape[-1])))
        else:
            scores = with_coupled_noise(logits, position, draw)
        best, ranked = best_tokens(scores, level.width)
        place = np.minimum(level.parent, best.shape[1] - 1), level.rank
        tokens.append(draw.tokens(ranked)[:, *place])
        valid.append((best[:, *place] > -jnp.inf) & is_real[:, level.parent])
        if len(level.fed) == 0:
            break
        is_real = valid[-1][:, level.fed]
        parents = jnp.broadcast_to(level.parent[level.fed], is_real.shape)
        nodes = feed(nodes, parents, tokens[-1][:, level.fed], depth)
    return assemble(choices, tokens, valid, level_probs), nodes


def assemble(
    choices: Choices,
    tokens: list[Array],
    valid: list[Array],
    level_probs: list[Array],
    scores: np.ndarray | None = None,
) -> DraftTree:
    """Returns the tree of all levels, the root first."""
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
        scores=None if scores is None else jnp.broadcast_to(scores, drafted.shape),
        is_chain=len(levels_of(choices)) == len(ordered),
    )
    return valid_first(tree)


def with_coupled_noise(
    logits: Float[Array, "B F V"], position: Int[Array, " B"], draw: Draw
) -> Float[Array, "B F V"]:
    """Adds to the logits the noise with which the target will draw its token at `position`.

    At temperature T the target's token is the argmax of `l + T g`, with its logits l and noise g
    that depends on the position alone; it never draws tokens that its filters cut. Here the
    drafter's logits replace the target's. They are returned unchanged unless
    `Sampling.noise_is_known`.
    """
    logits = logits.astype(jnp.float32)
    if not draw.sampling.noise_is_known:
        return logits
    noise = draw.noise(position[:, None], logits.shape[-1])
    penalty = jnp.where(draw.filtered(logits) > -jnp.inf, 0.0, CUT_PENALTY)
    return logits + draw.temperature * (noise - penalty)


def most_likely(
    logits: Float[Array, "B F V"],
    position: Int[Array, " B"],
    draw: Draw,
    noise_share: float,
    k: int,
) -> tuple[Float[Array, "B F K"], Int[Array, "B F K"]]:
    """Returns the log-probabilities and ids of the k tokens that the target is most likely to draw.

    See `Eagle2`.
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


class Beam(NamedTuple):
    """The sizes of a beam search, and of the tree that is chosen from its nodes."""

    depth: int
    top_k: int  # children per node
    width: int  # nodes per depth that have any, at most
    num_tokens: int  # nodes of the tree, root included, at most
    noise_share: float

    @property
    def pool_sizes(self) -> list[int]:
        """The nodes of each depth that the tree is chosen from."""
        sizes = [self.top_k]
        for _ in range(1, self.depth):
            sizes.append(min(sizes[-1], self.width) * self.top_k)
        return sizes

    @property
    def num_nodes(self) -> int:
        """The nodes of the tree, root included."""
        return min(self.num_tokens, sum(self.pool_sizes) + 1)


def beam_tree(
    beam: Beam,
    context: Context,
    draw: Draw,
    root: Values,
    logits_below: Callable[[Values, int], Float[Array, "B F V"]],
    feed: Callable[..., Values] = lambda nodes, *_: nodes,
) -> tuple[DraftTree, Values]:
    """Drafts the best nodes of a beam search, by the product of the probabilities of their path.

    The pool holds the same number of nodes below the root and below each of the best nodes of the
    depth above. `root`, `logits_below`, `feed` and the result are as in `level_tree`.
    """
    batch, top_k, sizes, nodes = len(context.length), beam.top_k, beam.pool_sizes, root
    scores, place = jnp.zeros((batch, 1)), jnp.full((batch, 1), -1)  # in the pool; -1 is the root
    pool = []  # tokens, scores and parents of each depth
    for depth in range(beam.depth):
        logits, position = logits_below(nodes, depth + 1), context.length + depth
        log_probs, best = most_likely(logits, position, draw, beam.noise_share, top_k)
        below = (scores[..., None] + log_probs).reshape(batch, -1)
        tokens = jnp.broadcast_to(best, (*scores.shape, top_k)).reshape(batch, -1)
        pool.append((tokens, below, jnp.repeat(place, top_k, axis=1)))
        if depth == beam.depth - 1:
            break
        scores, chosen = lax.top_k(below, min(beam.width, below.shape[1]))
        fed = jnp.take_along_axis(tokens, chosen, axis=1)
        nodes = feed(nodes, chosen // top_k, fed, depth + 1)
        place = chosen + sum(sizes[:depth])
    tokens, scores, parents = (jnp.concatenate(parts, axis=1) for parts in zip(*pool, strict=True))
    depths = np.repeat(np.arange(1, beam.depth + 1), sizes)
    pooled = tokens, scores, parents, depths
    return best_of_pool(context.root, *pooled, beam.num_nodes, top_k == 1), nodes


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

    In the pool parents come before their children; `parents` are places in it, -1 for the root.
    `scores` are log-probabilities of paths, -inf for nodes that do not exist.
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


@dataclass(frozen=True)
class DepthTreeDrafter(ChoiceTree):
    """Builds a tree from one distribution per depth, shared by all nodes there, in one pass.

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
        return super().num_nodes if self.tree == "static" else self.beam.num_nodes

    @property
    def beam(self) -> Beam:
        """The search for a dynamic tree."""
        sizes = self.max_depth, self.top_k, self.num_tokens - 1, self.num_tokens
        return Beam(*sizes, self.noise_share)

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
        return beam_tree(self.beam, context, draw, None, logits_below)[0]
