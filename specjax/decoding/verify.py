"""Verification of a draft tree: accepts a path and adds the bonus token.

`coupled`: the target's token after each node depends on the text and the key alone; nodes that
carry these tokens are accepted. `rejection`: Leviathan's rule on chains, and the recursive rule
over siblings on trees (ParallelSpec, Algorithm 1); tokens equal those of plain decoding in
distribution only. `typical`: any token that is likely enough is accepted (Medusa, section 2.3.1);
neither tokens nor distribution are those of plain decoding.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.core.ranking import best_score, best_token
from specjax.decoding.sampling import ACCEPT, BONUS, Draw
from specjax.decoding.tree import (
    NO_BONUS,
    DraftTree,
    LogProbs,
    TokenLogProbs,
    Verification,
    ancestors,
)


def verify(
    tree: DraftTree,
    logits: Float[Array, "B N V"],
    draw: Draw,
    root_slot: Int[Array, " B"],
    max_depth: int,
) -> Verification:
    """Verifies a draft tree: accepts a path and adds the bonus token.

    `logits[b, n]` are the target's for the token after node n; `root_slot` is the root's position.
    If the largest processed logit after the path is NaN or infinite, the bonus is NO_BONUS.
    """
    raw, logits = logits, draw.processed(logits, tree, max_depth)
    sampling = draw.sampling
    rule = _rejection if sampling.needs_draft_probs else _typical if sampling.is_lossy else _coupled
    verification = rule(tree, logits, draw, root_slot, max_depth)
    # A slice per sequence: a gather with an index per token would cost as much as the argmax.
    best = jax.vmap(lambda logits, path, count: jnp.max(logits[path[count]]))(
        logits, verification.path, verification.num_accepted
    )
    if (count := sampling.logprobs) is not None:
        tokens = verification.new_tokens(tree)
        on_path = jax.vmap(lambda rows, path: rows[path])
        raw, processed = (on_path(rows, verification.path) for rows in (raw, logits))
        log_probs = jax.nn.log_softmax(raw.astype(jnp.float32)), draw.filtered(processed)
        recorded = (TokenLogProbs.of(each, tokens, count) for each in log_probs)
        verification = replace(verification, logprobs=LogProbs(*recorded))
    return replace(verification, bonus=jnp.where(jnp.isfinite(best), verification.bonus, NO_BONUS))


def _coupled(
    tree: DraftTree,
    logits: Float[Array, "B N V"],
    draw: Draw,
    root_slot: Int[Array, " B"],
    max_depth: int,
) -> Verification:
    """Accepts the nodes that carry the target's token after their parent."""

    def at_once() -> Verification:
        after, place = root_slot[:, None] + tree.depth + 1, None
        if max_depth + 1 < tree.num_nodes:  # nodes of one depth share their noise
            after = root_slot[:, None] + jnp.arange(1, max_depth + 2)[None, :]
            place = tree.depth
        return follow(tree, _defined(draw.perturbed(logits, after, place=place)), max_depth)

    def node_by_node() -> Verification:
        def token_after(node: Int[Array, " B"]) -> Int[Array, " B"]:
            after = root_slot + jnp.take_along_axis(tree.depth, node[:, None], axis=1)[:, 0] + 1
            rows = jax.vmap(lambda rows, at: rows[at])(logits, node)
            return _defined(draw.perturbed(rows[:, None], after[:, None]))[:, 0]

        return walk(tree, token_after, max_depth)

    if draw.sampling.is_greedy:
        return at_once()
    # On a CPU a draw costs more than a step of a loop.
    return lax.platform_dependent(cpu=node_by_node, default=at_once)


def _defined(scores: Float[Array, "B N V"]) -> Int[Array, "B N"]:
    """Returns the token of the highest score, or NO_BONUS where that is NaN or infinite."""
    best, token = best_score(scores)
    return jnp.where(jnp.isfinite(best), token, NO_BONUS)


def walk(
    tree: DraftTree, token_after: Callable[[Int[Array, " B"]], Int[Array, " B"]], max_depth: int
) -> Verification:
    """Finds the path of `follow` (if siblings differ), but draws after accepted nodes alone."""

    def step(state):
        last = state[0]
        token = token_after(last).astype(jnp.int32)
        is_child = tree.valid & (tree.parents == last[:, None])
        agrees = is_child & (tree.tokens == token[:, None])
        goes_on, child = jnp.any(agrees, axis=1), jnp.argmax(agrees, axis=1).astype(jnp.int32)
        return jnp.where(goes_on, child, last), token, goes_on

    root = jnp.zeros(tree.tokens.shape[:1], jnp.int32)
    start = root, root, jnp.ones(root.shape, bool)
    last, bonus, _ = lax.while_loop(lambda state: jnp.any(state[2]), step, start)
    return _path_to(last, bonus, tree, ancestors(tree, max_depth), max_depth)


def follow(tree: DraftTree, target_tokens: Int[Array, "B N"], max_depth: int) -> Verification:
    """Accepts the path of children that carry the target's token after their parent.

    It works on all nodes at once; a loop would cost a GPU several kernel launches per node.
    """
    seen = ancestors(tree, max_depth)
    after_parent = jnp.take_along_axis(target_tokens, jnp.maximum(tree.parents, 0), axis=1)
    accepted = _accepted(tree.valid & (tree.tokens == after_parent), seen)
    last = jnp.argmax(jnp.where(accepted, tree.depth, -1), axis=1)
    bonus = jnp.take_along_axis(target_tokens, last[:, None], axis=1)[:, 0]
    return _path_to(last, bonus, tree, seen, max_depth)


def _accepted(agrees: Bool[Array, "B N"], seen: Bool[Array, "B N N"]) -> Bool[Array, "B N"]:
    """Whether a node and all its ancestors below the root agree with the target."""
    return jnp.all(agrees.at[:, 0].set(True)[:, None, :] | ~seen, axis=-1)


def _path_to(
    last: Int[Array, " B"],
    bonus: Int[Array, " B"],
    tree: DraftTree,
    seen: Bool[Array, "B N N"],
    max_depth: int,
) -> Verification:
    """Returns the path from the root to node `last`, zero padded, and the bonus after it."""
    on_path = jnp.take_along_axis(seen, last[:, None, None], axis=1)[:, 0]

    def of_sequence(on_path, depth):
        slot = jnp.where(on_path, depth, max_depth + 1)
        empty = jnp.zeros((max_depth + 1,), jnp.int32)
        return empty.at[slot].set(jnp.arange(tree.num_nodes, dtype=jnp.int32), mode="drop")

    path = jax.vmap(of_sequence)(on_path, tree.depth)
    return Verification(path, jnp.take_along_axis(tree.depth, last[:, None], axis=1)[:, 0], bonus)


def _typical(
    tree: DraftTree,
    logits: Float[Array, "B N V"],
    draw: Draw,
    root_slot: Int[Array, " B"],
    max_depth: int,
) -> Verification:
    """Accepts the longest path of typical tokens (ties: the most likely); draws the bonus."""
    seen = ancestors(tree, max_depth)
    log_probs = draw.filtered(logits)
    parents = jnp.maximum(tree.parents, 0)
    token_log_probs = jax.vmap(lambda values, parent, token: values[parent, token])(
        log_probs, parents, tree.tokens
    )
    probs = jnp.exp(log_probs)
    entropy = -jnp.sum(probs * jnp.log(probs + 1e-5), axis=-1)
    epsilon, delta = draw.sampling.typical_epsilon, draw.sampling.typical_delta
    threshold = jnp.minimum(epsilon, delta * jnp.exp(-entropy))  # Medusa, section 2.3.1
    threshold = jnp.take_along_axis(threshold, parents, axis=1)
    accepted = _accepted(tree.valid & (jnp.exp(token_log_probs) > threshold), seen)
    depth = jnp.where(accepted, tree.depth, -1)
    is_longest = depth == jnp.max(depth, axis=1, keepdims=True)
    below_root = seen & (tree.depth > 0)[:, None, :]
    total = jnp.sum(jnp.where(below_root, token_log_probs[:, None, :], 0.0), axis=-1)
    last = jnp.argmax(jnp.where(is_longest, total, -jnp.inf), axis=1)
    at_last = jnp.take_along_axis(logits, last[:, None, None], axis=1)
    after = root_slot[:, None] + jnp.take_along_axis(tree.depth, last[:, None], axis=1) + 1
    bonus = best_token(draw.perturbed(at_last, after)[:, 0])
    return _path_to(last, bonus, tree, seen, max_depth)


def _rejection(
    tree: DraftTree,
    logits: Float[Array, "B N V"],
    draw: Draw,
    root_slot: Int[Array, " B"],
    max_depth: int,
) -> Verification:
    target = jnp.exp(draw.filtered(logits))
    uniform = draw.uniform(root_slot[:, None], tree.num_nodes, ACCEPT)[:, 0]
    axes = (0, 0, 0, None if tree.draft_probs is None else 0, 0, 0, None)
    nodes = tree.tokens, tree.parents, tree.valid, tree.draft_probs
    last, bonus_probs = jax.vmap(reject, axes)(*nodes, target, uniform, tree.num_needed())
    noise = draw.noise(root_slot[:, None], bonus_probs.shape[-1], BONUS)[:, 0]
    bonus = best_token(jnp.log(bonus_probs) + noise)
    return _path_to(last, bonus, tree, ancestors(tree, max_depth), max_depth)


def reject(
    tokens: Int[Array, " N"],
    parents: Int[Array, " N"],
    valid: Bool[Array, " N"],
    draft_probs: Float[Array, "N V"] | None,
    target: Float[Array, "N V"],
    uniform: Float[Array, " N"],
    num_tried: Int[Array, ""],
) -> tuple[Int[Array, ""], Float[Array, " V"]]:
    """Tries the nodes of a tree in order; returns the deepest accepted one and the bonus's
    distribution.

    A child of the current node is accepted with probability p / q. After a rejection p becomes the
    residual distribution, max(p - q, 0) normalised, for the remaining siblings and the bonus, and
    q loses the rejected token (siblings are drawn without replacement). Without `draft_probs` nodes
    count as drawn with certainty. Only the first `num_tried` nodes are tried.
    """

    def try_node(node, carry):
        current, p, q = carry
        token = tokens[node]
        certain = jax.nn.one_hot(token, p.shape[0])
        q = certain if draft_probs is None else q
        is_child = valid[node] & (parents[node] == current)
        is_accepted = is_child & (q[token] > 0) & (uniform[node] * q[token] < p[token])
        residual = _normalise(jax.nn.relu(p - q), otherwise=p)
        rest = _normalise(q * (1 - certain), otherwise=q)
        next_q = certain if draft_probs is None else draft_probs[node]
        return (
            jnp.where(is_accepted, node, current),
            jnp.where(is_accepted, target[node], jnp.where(is_child, residual, p)),
            jnp.where(is_accepted, next_q, jnp.where(is_child, rest, q)),
        )

    first_q = jnp.zeros_like(target[0]) if draft_probs is None else draft_probs[0]
    start = (jnp.zeros((), jnp.int32), target[0], first_q)
    last, bonus_probs, _ = lax.fori_loop(1, num_tried, try_node, start)
    return last, bonus_probs


def _normalise(weights: Float[Array, " V"], otherwise: Float[Array, " V"]) -> Float[Array, " V"]:
    """Scales `weights` to sum 1; returns `otherwise` if they are all 0 (p equals q)."""
    total = jnp.sum(weights)
    return jnp.where(total > 0, weights / jnp.maximum(total, 1e-30), otherwise)
