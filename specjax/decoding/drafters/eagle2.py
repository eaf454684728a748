"""EAGLE-2: a tree that grows where the head is confident (Li et al. 2024). HASS drafts with it."""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.core.pytree import pytree
from specjax.core.settings import setting
from specjax.decoding.drafter import Context, Params, Proposal
from specjax.decoding.drafters._heads import HeadDrafter, HeadState
from specjax.decoding.drafters._trees import best_of_pool, check_width, most_likely
from specjax.decoding.sampling import Draw
from specjax.models.target import Target


@pytree
class Beam:
    """The F nodes of one depth that are expanded. H: hidden size."""

    features: Float[Array, "B F H"]  # predicted, at the node
    scores: Float[Array, "B F"]
    place: Int[Array, "B F"]  # in the pool; -1 is the root


@dataclass(frozen=True)
class Eagle2(HeadDrafter):
    """EAGLE-2: the best nodes of a beam search, by the product of the head's probabilities.

    Li et al. 2024, "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees". The
    pool is all nodes that were drafted, in that order: `top_k` below the root, then `top_k` below
    each of the `top_k` best of the depth above. The `num_tokens - 1` best by score are verified;
    ties go to the earlier, so parents come with their children.

    What differs from the published code: scores are float32, and above temperature 0, under
    `coupled`, a tree grows along what the target will draw, not only along what it might. The
    probability of a token is modelled as a mixture: with weight `noise_share` the softmax of the
    head's logits `with_coupled_noise`, which fits where the target is as unsure as the head and the
    noise decides; otherwise the head's own softmax, which fits where the target is sure. Nodes are
    chosen, not drawn: under `rejection` each counts as drawn with certainty.

    Defaults are the published ones, except `noise_share`, which as published would be 0.
    """

    top_k: int = setting(10, at_least=1)
    """Children per node, and nodes per depth that have any."""
    depth: int = setting(6, at_least=1)
    """Tokens of the longest path, as in HASS's paper. `depth` of the authors' code counts passes
    after the first, so it is one less."""
    num_tokens: int = setting(60, at_least=2)
    """Nodes to verify, root included."""
    noise_share: float = setting(0.8, at_least=0, at_most=1)
    """Weight, above temperature 0, of the distribution with the target's noise."""

    def check(self, target: Target, params: Any) -> None:
        super().check(target, params)
        check_width(self.top_k, self.head.config.num_drafted)

    @property
    def pool_depth(self) -> np.ndarray:
        """The depth of each node of the pool."""
        top_k = self.top_k
        deeper = np.repeat(np.arange(2, self.max_depth + 1), top_k**2)
        return np.concatenate([np.ones(top_k, int), deeper])

    @property
    def num_nodes(self) -> int:
        return min(self.num_tokens, len(self.pool_depth) + 1)

    @property
    def max_depth(self) -> int:
        return min(self.depth, self.num_tokens - 1)

    @property
    def num_fed(self) -> int:
        return self.top_k * (self.max_depth - 1)

    def propose(
        self, target: Target, params: Params, state: HeadState, context: Context, draw: Draw
    ) -> tuple[Proposal, HeadState]:
        head = self.bind(target, params)
        draw = head.restrict(draw)
        feature, state = self.catch_up(head, state, context)
        cache = state.cache
        batch, top_k = context.length.shape[0], self.top_k
        beam = Beam(feature, jnp.zeros((batch, 1)), jnp.full((batch, 1), -1))
        visible = jnp.zeros((batch, 1, 0), bool)
        itself = jnp.broadcast_to(jnp.eye(top_k, dtype=bool), (batch, top_k, top_k))
        pool = []  # tokens, scores and parents of each depth
        for depth in range(self.max_depth):
            position = context.length + depth
            logits = head.logits(beam.features, state)
            log_probs, best = most_likely(logits, position, draw, self.noise_share, top_k)
            scores = (beam.scores[..., None] + log_probs).reshape(batch, -1)
            tokens = best.reshape(batch, -1)
            pool.append((tokens, scores, jnp.repeat(beam.place, top_k, axis=1)))
            if depth == self.max_depth - 1:
                break
            kept, chosen = lax.top_k(scores, top_k)
            parent = (chosen // top_k)[..., None]
            above = jnp.take_along_axis(beam.features, parent, axis=1)
            seen = jnp.take_along_axis(visible, parent, axis=1)
            visible = jnp.concatenate([seen, itself], axis=2)
            fed = jnp.take_along_axis(tokens, chosen, axis=1)
            features, cache = head.feed(cache, fed, above, visible, position - 1)
            beam = Beam(features, kept, chosen + int(np.sum(self.pool_depth <= depth)))
        tokens, scores, parents = (
            jnp.concatenate(parts, axis=1) for parts in zip(*pool, strict=True)
        )
        tree = best_of_pool(
            context.root, tokens, scores, parents, self.pool_depth, self.num_nodes, top_k == 1
        )
        return Proposal(tree), replace(state, cache=cache)
