"""QueryRows: the rows of one forward pass, and who sees whom."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specjax.pytree import pytree


@pytree
class QueryRows:
    """B texts with Q rows each, fed to the model in one pass.

    C counts the scratch rows that this round has already written to the cache plus these Q; the
    committed part of the cache is always visible.
    """

    tokens: Int[Array, "B Q"]
    positions: Int[Array, "B Q"]  # absolute, for RoPE
    visible: Bool[Array, "B Q C"]


def causal_rows(tokens: Int[Array, "B Q"], start: Int[Array, " B"]) -> QueryRows:
    """Rows of running text: row q of text b sits at position `start[b] + q`, sees rows 0..q."""
    batch, count = tokens.shape
    below = jnp.tril(jnp.ones((count, count), bool))
    return QueryRows(
        tokens=tokens,
        positions=start[:, None] + jnp.arange(count)[None, :],
        visible=jnp.broadcast_to(below, (batch, count, count)),
    )
