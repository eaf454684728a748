"""Trees of the likeliest among many drafted nodes, whose score is the product of probabilities.

So choose EAGLE-2 and the dynamic trees of Medusa and ParallelSpec.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.decoding.drafters.level_trees import foreseen
from specjax.decoding.sampling import Draw
from specjax.decoding.tree import DraftTree, valid_first


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
