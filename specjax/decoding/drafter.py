"""The contract between the loop and a drafting method.

A drafter is a frozen, hashable dataclass whose fields are its settings. It proposes tokens and
learns from the outcome; it does not decide what is said (unless acceptance is `typical`).
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.core.errors import SpecjaxError
from specjax.core.pytree import pytree
from specjax.decoding.prompt import Prompt
from specjax.decoding.sampling import Draw
from specjax.decoding.tree import DraftTree, Verification, chain
from specjax.models.config import TransformerConfig
from specjax.models.target import ModelOutput, Taps

State = Any  # a pytree of the drafter's own


class Params(NamedTuple):
    """The arrays of one request: all weights, and whatever else the drafter reads."""

    target: Any
    drafter: Any = None  # weights, a classifier, a datastore, or None


class Context(NamedTuple):
    """The committed text of each row; what stands in `tokens` beyond `length` does not matter."""

    tokens: Int[Array, "B S"]
    length: Int[Array, " B"]

    @property
    def root(self) -> Int[Array, " B"]:
        """The last committed token, which is not in the target's cache yet."""
        return jnp.take_along_axis(self.tokens, self.length[:, None] - 1, axis=1)[:, 0]

    def copied(
        self, start: Int[Array, " B"], found: Bool[Array, " B"], num_tokens: int
    ) -> DraftTree:
        """A chain of the tokens from `start` on, as far as they are known; none unless `found`.

        The token before `start` is taken for the one that the root repeats.
        """
        source = start[:, None] - 1 + jnp.arange(num_tokens + 1)[None, :]
        drafted = jnp.take_along_axis(self.tokens, source[:, 1:], axis=1, mode="clip")
        count = jnp.where(found, jnp.clip(self.length - start, 0, num_tokens), 0)
        return chain(self.root, drafted, count, source=source)


@pytree
class Probe:
    """W extra target rows: computed for the drafter's sake, never accepted."""

    tokens: Int[Array, "B W"]
    offset: Int[Array, "B W"]  # position relative to the root
    anchor: Int[Array, "B W"]  # sees this valid node and its ancestors (0: the root)
    visible: Bool[Array, "B W W"]  # and these probe rows


class Proposal(NamedTuple):
    """What the drafter asks the target to judge in one pass."""

    tree: DraftTree
    probe: Probe | None = None


@pytree
class Outcome:
    """One finished round, as `Drafter.update` sees it. Unused parts cost nothing under jit."""

    tree: DraftTree
    # N node rows, then W probe rows; those of invalid nodes mean nothing. Of the attention there
    # is one row: that of the deepest accepted node.
    output: ModelOutput
    verification: Verification
    context: Context  # after the commit
    root_slot: Int[Array, " B"]  # position of the root in the text before the commit

    def along_path(self, rows: Array) -> Array:
        """Rows `[B, N(+W), ...]` of the accepted path, `[B, P, ...]`, root first."""
        path = self.verification.path
        return jax.vmap(lambda row, nodes: row[nodes])(rows, path)

    @property
    def last_node(self) -> Int[Array, " B"]:
        """The deepest accepted node: its logits gave the bonus."""
        at = self.verification.num_accepted[:, None]
        return jnp.take_along_axis(self.verification.path, at, axis=1)[:, 0]

    def at_last_node(self, rows: Array) -> Array:
        """Rows `[B, N(+W), ...]` at the deepest accepted node, `[B, ...]`."""
        return jax.vmap(lambda row, node: row[node])(rows, self.last_node)

    def last_attention(self) -> Float[Array, "B A S"]:
        """What the tapped heads look at from the deepest accepted node.

        Column s is position s of the text; rows of rejected nodes may lie beyond its end.
        """
        assert self.output.attention is not None
        return self.output.attention[:, :, 0]

    def probe_logits(self) -> Float[Array, "B W V"]:
        """The target's logits at the probe rows."""
        assert self.output.logits is not None
        return self.output.logits[:, self.tree.num_nodes :]


@runtime_checkable
class Drafter(Protocol):
    """What a drafting method provides; see the methods' files for how each does it.

    It may also have `row_widths`, a tuple of whole numbers: the nodes (root included) for which
    narrower passes are compiled, in place of `round.ROW_WIDTHS`.
    """

    @property
    def taps(self) -> Taps:
        """What the target must reveal."""
        ...

    @property
    def num_nodes(self) -> int:
        """N: nodes of the tree, root included."""
        ...

    @property
    def num_probes(self) -> int:
        """W: rows of the probe, usually 0."""
        ...

    @property
    def max_depth(self) -> int:
        """D: the longest path, root not counted."""
        ...

    def check(self, config: TransformerConfig, params: Any) -> None:
        """Raises SpecjaxError if these settings or params do not fit the target."""
        ...

    def init(self, params: Params, prompt: Prompt, prefill: ModelOutput, num_slots: int) -> State:
        """The state before the first round.

        `prefill` holds the tapped hidden states of `prompt[:-1]` (no logits, no attention);
        `num_slots` bounds the positions of text and rows together.
        """
        ...

    def propose(
        self, params: Params, state: State, context: Context, draw: Draw
    ) -> tuple[Proposal, State]:
        """Drafts below the root, which is the last token of `context`."""
        ...

    def update(self, params: Params, state: State, outcome: Outcome) -> State:
        """Takes in what the target decided, and what it revealed on the way."""
        ...


class Wrapper:
    """The sizes of a drafter that lets `inner` draft: those of `inner`."""

    inner: Drafter

    @property
    def taps(self) -> Taps:
        return self.inner.taps

    @property
    def num_nodes(self) -> int:
        return self.inner.num_nodes

    @property
    def num_probes(self) -> int:
        return self.inner.num_probes

    @property
    def max_depth(self) -> int:
        return self.inner.max_depth


def refuse_params(drafter: str, params: Any) -> None:
    """Raises SpecjaxError if a drafter without weights is given some: they belong to another."""
    if params is not None:
        raise SpecjaxError(
            f"{drafter} has no params but was given some; they belong to another drafter: pass the "
            "pair that specjax.load_drafter returned"
        )
