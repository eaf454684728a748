"""Trees that several drafters build: level by level, from one distribution per depth, or from a pool.

- `level_tree`: a static tree whose nodes' children are each node's own best tokens (EAGLE, Hydra).
- `depth_tree`: from one distribution per depth, which does not know what was drafted above (Medusa,
  ParallelSpec); static or dynamic.
- `best_of_pool`: the likeliest among many drafted nodes (EAGLE-2 and the dynamic trees).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.core.errors import SpecjaxError
from specjax.decoding.drafter import Context
from specjax.decoding.sampling import Draw
from specjax.decoding.tree import DraftTree, from_choices, sorted_choices, valid_first
from specjax.models.config import TransformerConfig

Choices = tuple[tuple[int, ...], ...]
Nodes = TypeVar("Nodes")

# What a token is set back by, in nats, if the target's filters would cut it from the head's own
# distribution. The target may keep it, so cutting it off loses late guesses, and leaving it where
# it is loses first ones: on random pairs of target and draft 2 kept nearly the best of both.
CUT_SETBACK = 2.0


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
    """The plan by which a static tree is drafted, by depth.

    Raises:
        SpecjaxError: see `EagleSettings`.
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


def check_widths(levels: tuple[Level, ...], config: TransformerConfig) -> None:
    """Raises SpecjaxError if a node has more children than the target has tokens."""
    widest = max(level.width for level in levels)
    if widest > config.vocab_size:
        raise SpecjaxError(
            f"the tree choices ask for {widest} children of one node, but the target has only "
            f"{config.vocab_size} tokens; ask for fewer"
        )


def level_tree(
    choices: Choices,
    context: Context,
    draw: Draw,
    root: Nodes,
    logits_below: Callable[[Nodes, int], Float[Array, "B F V"]],
    feed: Callable[[Nodes, Level, Int[Array, "B F"], int], Nodes],
) -> tuple[DraftTree, Nodes]:
    """A static tree whose nodes' children are each node's own best tokens, level by level.

    Under `rejection` above temperature 0 children are drawn without replacement, otherwise they are
    the best of the logits as `foreseen`.

    Args:
        choices: of the tree, as `levels_of` takes them.
        context: the committed text; the root is its last token.
        draw: how tokens are drawn.
        root: what the head knows of the root, as of the F nodes of any depth that it drafts below.
        logits_below: of such nodes, for the tokens at a depth, which counts from 1.
        feed: from such nodes to those of the next level that are `fed`, given with their tokens and
            their depth.

    Returns:
        The tree, and what `feed` has last returned.
    """
    levels, nodes = levels_of(choices), root
    is_drawn = draw.sampling.verification == "rejection" and not draw.sampling.is_greedy
    tokens, laws = [context.root[:, None]], []
    is_real = jnp.ones_like(tokens[0], bool)  # of the nodes to draft below
    valid = [is_real]
    for depth, level in enumerate(levels, start=1):
        logits, position = logits_below(nodes, depth), context.length + depth - 1
        if is_drawn:
            law = draw.filtered(logits)
            scores = law + draw.noise(position[:, None], law.shape[-1])
            laws.append(jnp.exp(law))
        else:
            scores = foreseen(logits, position, draw)
        best, ranked = lax.top_k(scores, level.width)
        tokens.append(ranked[:, level.parent, level.rank])
        exists = best[:, level.parent, level.rank] > -jnp.inf
        valid.append(exists & is_real[:, level.parent])
        if len(level.fed) == 0:
            break
        is_real = valid[-1][:, level.fed]
        nodes = feed(nodes, level, tokens[-1][:, level.fed], depth)
    return _joined(choices, tokens, valid, laws), nodes


def _joined(
    choices: Choices, tokens: list[Array], valid: list[Array], laws: list[Array]
) -> DraftTree:
    """The tree of the nodes and laws of each level, the root first."""
    ordered, parents = sorted_choices(choices)
    depth = np.array([0] + [len(choice) for choice in ordered])
    drafted = jnp.concatenate(tokens, axis=1)
    proposal = None
    if laws:
        law = jnp.concatenate(laws, axis=1)
        with_children = np.unique(parents[1:])  # the root and what was fed, in order
        nothing = jnp.zeros((*drafted.shape, law.shape[-1]))
        proposal = nothing.at[:, with_children].set(law)
    tree = DraftTree(
        tokens=drafted,
        parents=jnp.broadcast_to(parents, drafted.shape),
        depth=jnp.broadcast_to(depth, drafted.shape),
        valid=jnp.concatenate(valid, axis=1),
        proposal=proposal,
        is_chain=len(levels_of(choices)) == len(ordered),
    )
    return valid_first(tree)


def foreseen(
    logits: Float[Array, "B F V"], position: Int[Array, " B"], draw: Draw
) -> Float[Array, "B F V"]:
    """The logits, bent by the noise with which the target's token at `position` will be drawn.

    At temperature T the target says the best of `l + T g`, with its own logits l and noise g that
    depends on the position alone; tokens that its filters cut it never says. Here the drafter's
    logits stand for the target's. They stay as they are where the noise does not decide, or must
    not be known: see `Sampling.noise_is_known`.
    """
    sampling, logits = draw.sampling, logits.astype(jnp.float32)
    if not sampling.noise_is_known:
        return logits
    noise = draw.noise(position[:, None], logits.shape[-1])
    setback = jnp.where(draw.filtered(logits) > -jnp.inf, 0.0, CUT_SETBACK)
    return logits + sampling.temperature * (noise - setback)


def said_log_probs(
    logits: Float[Array, "B F V"], position: Int[Array, " B"], draw: Draw, noise_share: float
) -> Float[Array, "B F V"]:
    """How likely the target is to say each token at `position`: see `Eagle2` for the mixture."""
    blind = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    if noise_share == 0 or not draw.sampling.noise_is_known:
        return blind
    seeing = jax.nn.log_softmax(foreseen(logits, position, draw), axis=-1)
    if noise_share == 1:
        return seeing
    return jnp.logaddexp(seeing + math.log(noise_share), blind + math.log(1 - noise_share))


def best_of_pool(
    root: Int[Array, " B"],
    tokens: Int[Array, "B S"],
    scores: Float[Array, "B S"],
    parents: Int[Array, "B S"],
    pool_depth: np.ndarray,
    num_nodes: int,
    is_chain: bool,
) -> DraftTree:
    """The tree of the root and the best nodes of a pool, whose nodes are S, in its order.

    Args:
        root: the last committed token.
        tokens: of the pool's nodes; parents stand before their children.
        scores: log-probabilities of their paths, -inf for nodes that do not exist.
        parents: places in the pool, -1 for the root.
        pool_depth: `[S]`, the depth of each node.
        num_nodes: of the tree, root included.
        is_chain: whether the pool is one path.
    """
    kept = jnp.sort(lax.top_k(scores, num_nodes - 1)[1], axis=1)
    of_kept = lambda values: jnp.take_along_axis(values, kept, axis=1)  # noqa: E731
    # A kept node is numbered from 1 on, so its number is how many stand up to it in the pool.
    parents = jnp.sum(kept[:, None, :] <= of_kept(parents)[:, :, None], axis=2)
    with_root = lambda first, values: jnp.concatenate([first, values], axis=1)  # noqa: E731
    first = jnp.zeros_like(kept[:, :1])
    tree = DraftTree(
        tokens=with_root(root[:, None], of_kept(tokens)),
        parents=with_root(first - 1, parents),
        depth=with_root(first, jnp.asarray(pool_depth)[kept]),
        valid=with_root(first == 0, of_kept(scores) > -jnp.inf),
        is_chain=is_chain,
    )
    return valid_first(tree)


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
