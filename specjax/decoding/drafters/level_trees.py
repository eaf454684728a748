"""Static trees that are drafted level by level, each node's children its own best tokens.

So draft EAGLE's head and the heads of Hydra, which know what stands above a node. What a drafter
may know of the noise with which the target draws is here too (`foreseen`).
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.decoding.drafter import Context
from specjax.decoding.sampling import Draw
from specjax.decoding.tree import DraftTree, sorted_choices, valid_first
from specjax.errors import SpecjaxError
from specjax.models.config import LlamaConfig

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
    logits stand for the target's. They stay as they are where the noise does not decide, or must
    not be known: see `Sampling.noise_is_known`.
    """
    sampling, logits = draw.sampling, logits.astype(jnp.float32)
    if not sampling.noise_is_known:
        return logits
    noise = draw.noise(position[:, None], logits.shape[-1])
    setback = jnp.where(draw.filtered(logits) > -jnp.inf, 0.0, CUT_SETBACK)
    return logits + sampling.temperature * (noise - setback)
