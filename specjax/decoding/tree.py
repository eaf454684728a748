"""Draft trees in static shapes, and the result of verifying them.

Node 0 is the root (committed, but not yet in the target's cache). Parents stand before their
children and valid nodes before invalid ones, so the first n nodes are always a tree themselves.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.core.errors import SpecjaxError
from specjax.core.pytree import pytree, static
from specjax.core.ranking import best_tokens

Choices = tuple[tuple[int, ...], ...]  # the paths of a static tree, as ranks below the root

NO_PARENT = -1
NO_BONUS = -1  # the target's logits were not finite


@pytree
class DraftTree:
    """B trees of N nodes each, root included. V: vocabulary."""

    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"]  # NO_PARENT at the root
    depth: Int[Array, "B N"]  # 0 at the root
    valid: Bool[Array, "B N"]  # the root is always valid
    # Entry n: the distribution that node n's children were drawn from; None: they are certain.
    draft_probs: Float[Array, "B N V"] | None = None
    source: Int[Array, "B N"] | None = None  # position in the text it was copied from, if any
    scores: Float[Array, "B N"] | None = None  # log-probability of each path, if the drafter knows
    is_chain: bool = static(default=False)  # node i's parent is i - 1, in all sequences

    @property
    def num_nodes(self) -> int:
        return self.tokens.shape[1]

    def first(self, count: int) -> "DraftTree":
        """Returns the tree of the first `count` nodes."""
        return jax.tree.map(lambda values: values[:, :count], self)

    def num_valid(self) -> Int[Array, " B"]:
        """Returns the number of valid nodes of each tree, root included."""
        return jnp.sum(self.valid, axis=1, dtype=jnp.int32)

    def num_needed(self) -> Int[Array, ""]:
        """Returns the number of nodes up to the last valid one of all trees."""
        places = jnp.arange(1, self.num_nodes + 1, dtype=jnp.int32)
        return jnp.max(jnp.where(self.valid, places, 0))


@pytree
class TokenLogProbs:
    """Log-probabilities of tokens in a text, and the K most likely tokens at their places."""

    token: Float[Array, "B P"]
    top_tokens: Int[Array, "B P K"]
    top: Float[Array, "B P K"]

    @classmethod
    def of(
        cls, log_probs: Float[Array, "B P V"], tokens: Int[Array, "B P"], count: int
    ) -> "TokenLogProbs":
        """Reads the log-probabilities of `tokens` and of the `count` most likely ones."""
        top, top_tokens = best_tokens(log_probs, min(max(count, 1), log_probs.shape[-1]))
        token = jnp.take_along_axis(log_probs, tokens[..., None], axis=-1, mode="clip")
        return cls(token[..., 0], top_tokens[..., :count].astype(jnp.int32), top[..., :count])


@pytree
class LogProbs:
    """Log-probabilities by the target's own logits, and by those that tokens are drawn from."""

    raw: TokenLogProbs
    processed: TokenLogProbs  # after processors and filters; -inf where cut

    @classmethod
    def zeros(cls, batch: int, length: int, count: int) -> "LogProbs":
        """Returns an empty record of `length` tokens with `count` others each."""
        top = jnp.zeros((batch, length, count))
        empty = TokenLogProbs(jnp.zeros((batch, length)), top.astype(jnp.int32), top)
        return cls(empty, empty)


@pytree
class Verification:
    """The accepted path and the bonus token. P = max_depth + 1."""

    path: Int[Array, "B P"]  # accepted nodes, root first, zero padded
    num_accepted: Int[Array, " B"]  # root not counted
    bonus: Int[Array, " B"]  # the target's token after the path, or NO_BONUS
    logprobs: LogProbs | None = None  # of the tokens after the nodes of the path, if recorded

    @property
    def is_drafted(self) -> Bool[Array, "B P"]:
        """Whether the token after a node of the path was drafted; the next one is the bonus."""
        return jnp.arange(self.path.shape[1])[None, :] < self.num_accepted[:, None]

    def new_tokens(self, tree: DraftTree) -> Int[Array, "B P"]:
        """Returns the tokens after the nodes of the path: drafted ones, else the bonus."""
        below_root = jnp.pad(self.path[:, 1:], ((0, 0), (0, 1)))
        drafted = jnp.take_along_axis(tree.tokens, below_root, axis=1)
        return jnp.where(self.is_drafted, drafted, self.bonus[:, None])


def chain(
    root: Int[Array, " B"],
    drafted: Int[Array, "B D"],
    count: Int[Array, " B"],
    draft_probs: Float[Array, "B N V"] | None = None,
) -> DraftTree:
    """Returns a tree without branches: the root, then the first `count[b]` drafted tokens."""
    tokens = jnp.concatenate([root[:, None], drafted], axis=1)
    batch, num_nodes = tokens.shape
    steps = jnp.broadcast_to(jnp.arange(num_nodes), (batch, num_nodes))
    return DraftTree(
        tokens=tokens,
        parents=steps - 1,  # the root's is NO_PARENT
        depth=steps,
        valid=steps <= count[:, None],
        draft_probs=draft_probs,
        is_chain=True,
    )


def root_only(like: DraftTree, root: Int[Array, " B"]) -> DraftTree:
    """Returns a tree with the shapes of `like` (arrays or shapes) that drafts nothing."""
    tree = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
    return replace(
        tree,
        tokens=tree.tokens.at[:, 0].set(root),
        parents=tree.parents.at[:, 0].set(NO_PARENT),
        valid=tree.valid.at[:, 0].set(True),
    )


def choices_of(paths: str) -> Choices:
    """Reads the paths of a tree, a digit per rank: "01" is the second child of the first child."""
    return tuple(tuple(map(int, path)) for path in paths.split())


def sorted_choices(choices: Choices) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Returns the choices by depth and rank, as nodes 1, 2, ..., and the parents of all nodes."""
    for choice in choices:
        if not choice or min(choice) < 0:
            raise SpecjaxError(
                f"tree choice {choice} is not a path of ranks; write it as in (0,) or (0, 1)"
            )
    ordered = sorted(set(choices), key=lambda choice: (len(choice), choice))
    index = {(): 0} | {choice: node for node, choice in enumerate(ordered, start=1)}
    for choice in ordered:
        if choice[:-1] not in index:
            raise SpecjaxError(
                f"tree choice {choice} has no parent; add {choice[:-1]} to the choices"
            )
    return ordered, np.array([NO_PARENT] + [index[choice[:-1]] for choice in ordered])


def valid_first(tree: DraftTree) -> DraftTree:
    """Moves the valid nodes to the front, keeping their order."""
    order = jnp.argsort(~tree.valid, axis=1, stable=True)
    new_index = jnp.argsort(order, axis=1)
    moved = jax.tree.map(lambda leaf: jax.vmap(lambda values, at: values[at])(leaf, order), tree)
    parents = jnp.take_along_axis(new_index, jnp.maximum(moved.parents, 0), axis=1)
    return replace(moved, parents=parents.at[:, 0].set(NO_PARENT))


def merge_paths(
    root: Int[Array, " B"], paths: Int[Array, "B G L"], lengths: Int[Array, "B G"], num_nodes: int
) -> DraftTree:
    """Returns the prefix tree of G drafted continuations.

    Path g has `lengths[b, g]` tokens. If they do not fit into `num_nodes` (root included), nodes of
    later paths are dropped.
    """
    batch, num_paths, max_length = paths.shape
    steps = jnp.arange(max_length)
    used = steps[None, None, :] < lengths[..., None]  # [B, G, L]
    same = paths[:, :, None] == paths[:, None, :]
    prefix = jnp.cumprod(same & used[:, None, :], axis=-1).astype(bool)  # [B, g, g', L]
    owner = jnp.argmax(prefix, axis=2)  # the first path with the same tokens up to here
    is_new = used & (owner == jnp.arange(num_paths)[None, :, None])
    rank = jnp.cumsum(is_new.reshape(batch, -1), axis=1).reshape(is_new.shape)
    node = jnp.take_along_axis(rank, owner, axis=1)  # path-major, the root is node 0
    parent = jnp.pad(node[..., :-1], ((0, 0), (0, 0), (1, 0)))
    slot = jnp.where(is_new & (node < num_nodes), node, num_nodes).reshape(batch, -1)

    def place(values, empty):
        flat = jnp.broadcast_to(values, is_new.shape).reshape(batch, -1)
        blank = jnp.full((batch, num_nodes), empty, flat.dtype)
        return jax.vmap(lambda old, at, new: old.at[at].set(new, mode="drop"))(blank, slot, flat)

    return DraftTree(
        tokens=place(paths, 0).at[:, 0].set(root),
        parents=place(parent, 0).at[:, 0].set(NO_PARENT),
        depth=place(steps + 1, 0),
        valid=place(jnp.ones((), bool), False).at[:, 0].set(True),
    )


def ancestors(tree: DraftTree, max_depth: int) -> Bool[Array, "B N N"]:
    """Whether node j is node i or one of its ancestors, at entry [b, i, j].

    Each step doubles the distance covered, so log2(depth) steps suffice.
    """
    batch, num_nodes = tree.tokens.shape
    if tree.is_chain:
        return jnp.broadcast_to(jnp.tri(num_nodes, dtype=bool), (batch, num_nodes, num_nodes))
    seen = jnp.broadcast_to(jnp.eye(num_nodes, dtype=bool), (batch, num_nodes, num_nodes))
    jump = jnp.maximum(tree.parents, 0)
    for _ in range(max(1, max_depth).bit_length()):
        seen = seen | jnp.take_along_axis(seen, jump[..., None], axis=1)
        jump = jnp.take_along_axis(jump, jump, axis=1)
    return seen
