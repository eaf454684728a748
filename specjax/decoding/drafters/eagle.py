"""EAGLE: a static tree from a head that continues the target's features (Li et al. 2024)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.decoding.drafter import Context, Params, Proposal
from specjax.decoding.drafters.with_head import HeadDrafter, HeadState
from specjax.decoding.sampling import Draw
from specjax.decoding.tree import DraftTree, sorted_choices, valid_first
from specjax.errors import SpecjaxError
from specjax.models.config import LlamaConfig
from specjax.models.heads.eagle import EagleHead
from specjax.models.llama import Llama

Choices = tuple[tuple[int, ...], ...]
Nodes = TypeVar("Nodes")

PUBLISHED_TREE: Choices = (  # of EAGLE-1: 25 nodes, in 5 passes of the head
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)

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


@dataclass(frozen=True)
class EagleSettings:
    """The settings of `eagle` as one writes them; with a head they make an `Eagle`.

    `choices` are paths of ranks, as Medusa's. But rank r below a node is that node's own r-th
    token, and only nodes with children cost a row of the head.

    Raises:
        SpecjaxError: for choices that are no tree, or leave out a rank better than one they have.
    """

    choices: Choices = PUBLISHED_TREE

    def __post_init__(self):
        levels_of(self.choices)  # judges them

    def build(self, head: EagleHead, target: Llama) -> "Eagle":
        """The drafter."""
        return Eagle(head, target, self)

    @property
    def levels(self) -> tuple[Level, ...]:
        """The plan by which the tree is drafted."""
        return levels_of(self.choices)


@dataclass(frozen=True)
class Eagle(HeadDrafter):
    """EAGLE: a tree of fixed shape, the children of each node its own best tokens.

    Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty". Under
    `rejection` above temperature 0 children are drawn without replacement, as published; otherwise
    they are the best of the logits as `foreseen`.

    Raises:
        SpecjaxError: if a node has more children than the target has tokens.
    """

    settings: EagleSettings = EagleSettings()

    def __post_init__(self):
        check_widths(self.settings.levels, self.target.config)

    @property
    def num_nodes(self) -> int:
        return len(set(self.settings.choices)) + 1

    @property
    def max_depth(self) -> int:
        return len(self.settings.levels)

    @property
    def num_fed(self) -> int:
        return sum(len(level.fed) for level in self.settings.levels)

    def propose(
        self, params: Params, state: HeadState, context: Context, draw: Draw
    ) -> tuple[Proposal, HeadState]:
        features, state = self.catch_up(params, state, context)

        def feed(nodes, level: Level, tokens: Int[Array, "B F"], depth: int):
            features, cache = nodes
            above = features[:, level.parent[level.fed]]
            visible = jnp.broadcast_to(level.visible, (len(tokens), *level.visible.shape))
            slot = context.length - 2 + depth  # a token's place, less one; the root has depth 0
            return self.feed(params, cache, tokens, above, visible, slot)

        tree, (_, cache) = level_tree(
            self.settings.choices,
            context,
            draw,
            (features, state.cache),
            logits_below=lambda nodes, _: self.target.logits(params.target, nodes[0]),
            feed=feed,
        )
        return Proposal(tree), replace(state, cache=cache)


def check_widths(levels: tuple[Level, ...], config: LlamaConfig) -> None:
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
    logits stand for the target's. They stay as they are at temperature 0, and under `rejection`,
    whose noise a drafter must not know.
    """
    sampling, logits = draw.sampling, logits.astype(jnp.float32)
    if sampling.is_greedy or sampling.verification == "rejection":
        return logits
    noise = draw.noise(position[:, None], logits.shape[-1])
    setback = jnp.where(draw.filtered(logits) > -jnp.inf, 0.0, CUT_SETBACK)
    return logits + sampling.temperature * (noise - setback)
