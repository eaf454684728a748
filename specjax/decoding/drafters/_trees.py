"""Trees that several drafters build.

- `level_tree`: a static tree whose nodes' children are each node's own best tokens.
- `best_of_pool`: the most likely among many drafted nodes.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.core.errors import SpecjaxError
from specjax.core.ranking import best_tokens
from specjax.decoding.drafter import Context
from specjax.decoding.sampling import Draw
from specjax.decoding.tree import DraftTree, sorted_choices, valid_first

Choices = tuple[tuple[int, ...], ...]
Nodes = TypeVar("Nodes")

# Penalty, in nats, for a token that the target's filters cut from the head's distribution. The
# target may still keep it: removing it hurts lower-ranked guesses, no penalty hurts the first. On
# random pairs of target and draft, 2 nats were close to the best for both.
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


def check_width(width: int, num_drafted: int) -> None:
    """Checks that no node has more children than the head has tokens."""
    if width > num_drafted:
        raise SpecjaxError(
            f"the tree gives one node {width} children, but the head drafts only "
            f"{num_drafted} tokens; lower top_k, or use smaller choices"
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

    `root`, and what `feed` returns, are the head's values at the nodes of one depth that have
    children. `feed` takes such values, a level, the tokens of its `fed` nodes and their depth;
    `logits_below` takes them and the depth of the children, from 1. Returns the tree, and the
    values that were fed last.
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
            level_probs.append(draw.over_vocabulary(jnp.exp(log_probs)))
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
