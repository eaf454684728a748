"""Verification: which drafted nodes the target agrees with, and the token it adds.

`coupled`: the target's token after each node is a function of the text and the key alone, and
nodes carrying exactly those tokens are accepted. `rejection`: Leviathan's rule on chains and the
recursive rule over siblings on trees (ParallelSpec, Algorithm 1); tokens are then those of plain
decoding in distribution only.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.decoding.sampling import ACCEPT, BONUS, Draw
from specjax.decoding.tree import DraftTree, Verification, ancestors


def verify(
    tree: DraftTree,
    logits: Float[Array, "B N V"],
    draw: Draw,
    root_slot: Int[Array, " B"],
    max_depth: int,
) -> Verification:
    """Accepts the path of `tree` that the target would have said itself, and adds the bonus.

    `logits[b, n]` are the target's for the token after node n; the root stands at position
    `root_slot` of the text.
    """
    if draw.sampling.verification == "rejection" and not draw.sampling.is_greedy:
        return _rejection(tree, logits, draw, root_slot, max_depth)
    after = root_slot[:, None] + tree.depth + 1
    wanted = jnp.argmax(draw.perturbed(logits, after), axis=-1)
    return follow(tree, wanted, max_depth)


def follow(tree: DraftTree, wanted: Int[Array, "B N"], max_depth: int) -> Verification:
    """The path from the root along children that carry their parent's wanted token.

    All nodes at once: going node by node would cost a GPU several kernel launches for each.
    """
    seen = ancestors(tree, max_depth)
    parent_wants = jnp.take_along_axis(wanted, jnp.maximum(tree.parents, 0), axis=1)
    agrees = tree.valid & (tree.tokens == parent_wants)
    agrees = agrees.at[:, 0].set(True)
    accepted = jnp.all(agrees[:, None, :] | ~seen, axis=-1)
    last = jnp.argmax(jnp.where(accepted, tree.depth, -1), axis=1)
    on_path = jnp.take_along_axis(seen, last[:, None, None], axis=1)[:, 0]
    at = lambda values: jnp.take_along_axis(values, last[:, None], axis=1)[:, 0]  # noqa: E731
    return Verification(_path(on_path, tree.depth, max_depth), at(tree.depth), at(wanted))


def _path(
    on_path: Bool[Array, "B N"], depth: Int[Array, "B N"], max_depth: int
) -> Int[Array, "B P"]:
    """Nodes of the path by depth, zero padded."""
    num_nodes = depth.shape[1]

    def of_row(on_path, depth):
        slot = jnp.where(on_path, depth, max_depth + 1)
        empty = jnp.zeros((max_depth + 1,), jnp.int32)
        return empty.at[slot].set(jnp.arange(num_nodes, dtype=jnp.int32), mode="drop")

    return jax.vmap(of_row)(on_path, depth)


def _rejection(
    tree: DraftTree,
    logits: Float[Array, "B N V"],
    draw: Draw,
    root_slot: Int[Array, " B"],
    max_depth: int,
) -> Verification:
    target = jnp.exp(draw.filtered(logits))
    uniform = draw.uniform(root_slot[:, None], tree.num_nodes, ACCEPT)[:, 0]
    axes = (0, 0, 0, None if tree.proposal is None else 0, 0, 0, None)
    last, rest = jax.vmap(reject, axes)(
        tree.tokens,
        tree.parents,
        tree.valid,
        tree.proposal,
        target,
        uniform,
        jnp.max(tree.num_valid()),
    )
    noise = draw.noise(root_slot[:, None], rest.shape[-1], BONUS)[:, 0]
    on_path = jnp.take_along_axis(ancestors(tree, max_depth), last[:, None, None], axis=1)[:, 0]
    return Verification(
        path=_path(on_path, tree.depth, max_depth),
        num_accepted=jnp.take_along_axis(tree.depth, last[:, None], axis=1)[:, 0],
        bonus=jnp.argmax(jnp.log(rest) + noise, axis=-1),
    )


def reject(
    tokens: Int[Array, " N"],
    parents: Int[Array, " N"],
    valid: Bool[Array, " N"],
    proposal: Float[Array, "N V"] | None,
    target: Float[Array, "N V"],
    uniform: Float[Array, " N"],
    last_valid: Int[Array, ""],
) -> tuple[Int[Array, ""], Float[Array, " V"]]:
    """Tries one tree's nodes in order; returns the deepest accepted one and the bonus's law.

    A child of the current node is accepted with probability p / q. A miss leaves the residual
    `p - q` to the siblings that follow and to the bonus, and `q` without the token that failed
    (siblings are drawn without replacement). Chosen nodes, which have no `proposal`, count as drawn
    with certainty. Only the first `last_valid` nodes are tried.
    """

    def try_node(node, carry):
        here, p, q = carry
        token = tokens[node]
        own = jax.nn.one_hot(token, p.shape[0])
        q = own if proposal is None else q
        is_child = valid[node] & (parents[node] == here)
        hit = is_child & (q[token] > 0) & (uniform[node] * q[token] < p[token])
        residual = _normalise(jax.nn.relu(p - q), otherwise=p)
        rest = _normalise(q * (1 - own), otherwise=q)
        next_q = own if proposal is None else proposal[node]
        return (
            jnp.where(hit, node, here),
            jnp.where(hit, target[node], jnp.where(is_child, residual, p)),
            jnp.where(hit, next_q, jnp.where(is_child, rest, q)),
        )

    first_q = jnp.zeros_like(target[0]) if proposal is None else proposal[0]
    start = (jnp.zeros((), jnp.int32), target[0], first_q)
    last, rest, _ = lax.fori_loop(1, last_valid, try_node, start)
    return last, rest


def _normalise(weights: Float[Array, " V"], otherwise: Float[Array, " V"]) -> Float[Array, " V"]:
    """`weights` scaled to sum 1; `otherwise` where they vanish (p equal to q up to rounding)."""
    total = jnp.sum(weights)
    return jnp.where(total > 0, weights / jnp.maximum(total, 1e-30), otherwise)
