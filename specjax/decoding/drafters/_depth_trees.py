"""Trees of one distribution per depth, static or dynamic, as Medusa and ParallelSpec draft them."""

from abc import abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from specjax.core.ranking import best_tokens
from specjax.core.settings import SettingError, setting
from specjax.decoding.drafter import Context, Drafter
from specjax.decoding.drafters._heads import check_head
from specjax.decoding.drafters._trees import (
    Choices,
    best_of_pool,
    check_width,
    levels_of,
    most_likely,
    with_coupled_noise,
)
from specjax.decoding.sampling import Draw
from specjax.decoding.tree import DraftTree, from_choices, sorted_choices, valid_first
from specjax.models.target import Target

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
ONLY_DYNAMIC = ("top_k", "num_tokens", "depth", "noise_share")  # not read by a static tree


@dataclass(frozen=True)
class DepthTreeDrafter(Drafter):
    """Makes a tree of one distribution per depth, whatever was drafted above; it costs one pass.

    A `static` tree has the shape of `choices`, paths of ranks: the Cartesian product of the best
    tokens of each depth, cut to the choices; those deeper than the head predicts are left out. A
    `dynamic` tree holds, of all paths over the `top_k` best tokens of each depth, the most likely
    `num_tokens - 1` nodes (`num_tokens` counts the root), down to `depth` (0: as deep as the head
    predicts), with `noise_share` as in EAGLE-2. It ignores `choices`, which may be tuned ones.
    """

    head: Any
    choices: Choices = MEDUSA_TREE
    """Paths of the static tree, as ranks ((0,), (0, 0), ...); each comes with its parent."""
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

    pass_widths = ()  # a draft always fills the tree

    def check_settings(self) -> None:
        levels_of(self.choices)  # checks them
        for field in fields(self) if self.tree == "static" else ():
            if field.name in ONLY_DYNAMIC and getattr(self, field.name) != field.default:
                problem = "has no effect on a static tree; add tree=dynamic, or omit it"
                raise SettingError(field.name, problem)

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
        """The choices of a static tree within the depth that the head predicts."""
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
        width = self.top_k if self.tree == "dynamic" else 1 + max(map(max, self.choices))
        check_width(width, self.head.config.num_drafted)

    def tree_of(self, logits: Float[Array, "B D V"], context: Context, draw: Draw) -> DraftTree:
        """Makes the tree below the root from logits of its depths, `logits[:, 0]` at depth 1.

        Under `rejection` above temperature 0 the static tree is drawn without replacement at each
        depth (ParallelSpec, algorithm 1). All nodes of one depth then have the same children: only
        those of one of them are ever tried, and nothing that led there depends on them.
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
        # A node exists if all tokens of its path do; filtered ones do not.
        exists = best > -jnp.inf
        paths = [[exists[:, d, choice[d]] for d in range(len(choice))] for choice in ordered]
        valid = jnp.stack([jnp.all(jnp.stack(path), axis=0) for path in paths], axis=1)
        tree = from_choices(context.root, draw.tokens(ranked), choices)
        draft_probs = None
        if log_probs is not None:  # entry n: for the children of node n; leaves have none
            below = jnp.minimum(tree.depth, depths - 1)[:, :, None]
            probs = draw.over_vocabulary(jnp.exp(log_probs))
            draft_probs = jnp.take_along_axis(probs, below, axis=1)
        tree = replace(
            tree,
            valid=jnp.pad(valid, ((0, 0), (1, 0)), constant_values=True),
            draft_probs=draft_probs,
            is_chain=depths == len(ordered),
        )
        return valid_first(tree)

    def _dynamic(self, logits: Float[Array, "B D V"], context: Context, draw: Draw) -> DraftTree:
        """Takes the most likely nodes, found with their parents by a beam as wide as the tree."""
        batch, top_k, sizes = len(logits), self.top_k, self.pool_sizes
        scores = jnp.zeros((batch, 1))
        place = jnp.full((batch, 1), -1)  # in the pool; -1 is the root
        pool = []  # tokens, scores and parents of each depth
        for depth, size in enumerate(sizes):
            position, count = context.length + depth, scores.shape[1]
            here = logits[:, depth : depth + 1]
            log_probs, best = most_likely(here, position, draw, self.noise_share, top_k)
            log_probs = jnp.broadcast_to(log_probs, (batch, count, top_k))
            below = (scores[:, :, None] + log_probs).reshape(batch, -1)
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
