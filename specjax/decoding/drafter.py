"""The contract between the loop and a drafting method.

A drafter proposes tokens and observes the outcome; the target decides which are generated.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.core.errors import SpecjaxError
from specjax.core.pytree import pytree
from specjax.core.settings import check_fields, setting
from specjax.decoding.prompt import Prompt
from specjax.decoding.sampling import Draw, SamplingValues
from specjax.decoding.tree import DraftTree, Verification, chain
from specjax.models.target import ModelOutput, Taps, Target

State = Any  # a pytree that the drafter defines
LONG_MATCH = 5  # equal tokens before a copy and before its source, at least


class Params(NamedTuple):
    """The arrays of one request: the weights, and what else drafter and processors read."""

    target: Any
    drafter: Any = None  # weights, a classifier, a datastore, or None
    processors: tuple[Any, ...] = ()  # of each of `Sampling.processors`, if any has arrays
    sampling: SamplingValues | None = None  # None: all sequences share the settings


class Start(NamedTuple):
    """The inputs from which a drafter makes its first state."""

    target: Target
    params: Params
    prompt: Prompt
    prefill: ModelOutput  # tapped hidden states of `prompt[:-1]`; no logits, no attention
    num_slots: int  # of the cache, per sequence: for the text and one pass
    max_depth: int  # drafted tokens of the longest path
    is_part: bool = False  # of a hybrid, so a path may be another drafter's


class Context(NamedTuple):
    """The committed tokens of each sequence; entries beyond `length` are arbitrary."""

    tokens: Int[Array, "B S"]
    length: Int[Array, " B"]

    @property
    def root(self) -> Int[Array, " B"]:
        """The last committed token, which is not in the target's cache yet."""
        return jnp.take_along_axis(self.tokens, self.length[:, None] - 1, axis=1)[:, 0]


@pytree
class Probe:
    """W extra tokens of a pass, whose outputs the drafter reads; they are never accepted."""

    tokens: Int[Array, "B W"]
    offset: Int[Array, "B W"]  # position relative to the root
    anchor: Int[Array, "B W"]  # sees this valid node and its ancestors (0: the root)
    visible: Bool[Array, "B W W"]  # and these probe tokens


class Proposal(NamedTuple):
    """A draft for the target to verify in one pass, with an optional probe."""

    tree: DraftTree
    probe: Probe | None = None


@pytree
class Outcome:
    """One finished round, as `Drafter.update` sees it. Unused parts cost nothing under jit."""

    tree: DraftTree
    # Of N nodes, then W probe tokens; arbitrary at invalid nodes. Attention is that of the deepest
    # accepted node alone.
    output: ModelOutput
    verification: Verification
    context: Context  # after the commit
    root_slot: Int[Array, " B"]  # position of this round's root

    @property
    def num_committed(self) -> Int[Array, " B"]:
        """Tokens added to each sequence: path and bonus, unless EOS or the limit cut them."""
        return self.context.length - 1 - self.root_slot

    def along_path(self, values: Array) -> Array:
        """Returns the entries of `values [B, N + W, ...]` on the path, `[B, P, ...]`."""
        return jax.vmap(lambda entries, path: entries[path])(values, self.verification.path)

    def last_attention(self) -> Float[Array, "B A S"]:
        """Returns the attention of the tapped heads at the deepest accepted node.

        Column s is position s of the text; columns beyond its end may hold rejected nodes.
        """
        assert self.output.attention is not None
        return self.output.attention[:, :, 0]

    def probe_logits(self) -> Float[Array, "B W V"]:
        """Returns the target's logits at the probe tokens."""
        assert self.output.logits is not None
        return self.output.logits[:, self.tree.num_nodes :]


@dataclass(frozen=True)
class Drafter(ABC):
    """A drafting method. Subclasses are frozen, hashable dataclasses; their fields are settings.

    A subclass defines `num_nodes` and `propose`. It overrides `init` and `update` if it carries a
    state, `taps` if it reads more of the target than its tokens, and `check` if it reads params.
    `params` are those of the request: `params.target` and `params.drafter`.
    """

    num_nodes: ClassVar[int]  # N: nodes of the tree, root included
    num_probes: ClassVar[int] = 0  # W: tokens of the probe
    taps: ClassVar[Taps] = Taps(logits=False)  # target outputs the drafter reads
    # Nodes (root included) of the narrower passes to compile; None: the engine chooses. A target
    # with a `padded_width` has none.
    pass_widths: ClassVar[tuple[int, ...] | None] = None

    def __post_init__(self):
        check_fields(self)
        self.check_settings()

    def check_settings(self) -> None:  # noqa: B027 - most have nothing to check
        """Checks combinations of settings; must not read fields without a default."""

    @property
    def pass_width(self) -> int:
        """Tokens of a pass per sequence: nodes and probe."""
        return self.num_nodes + self.num_probes

    @property
    def max_depth(self) -> int:
        """D: drafted tokens of the longest path."""
        return self.num_nodes - 1

    def check(self, target: Target, params: Any) -> None:
        """Checks that settings and `params.drafter`, passed as `params`, fit the target."""
        if params is not None:
            raise SpecjaxError(
                f"{type(self).__name__} has no params but was given some; they belong to another "
                "drafter: pass the pair that specjax.load_drafter returned"
            )

    def init(self, start: Start) -> State:
        """Returns the state before the first round."""
        return None

    @abstractmethod
    def propose(
        self, target: Target, params: Params, state: State, context: Context, draw: Draw
    ) -> tuple[Proposal, State]:
        """Drafts below the root, which is the last token of `context`."""

    def skip(
        self, target: Target, params: Params, state: State, context: Context, draw: Draw
    ) -> State:
        """Advances the state for a round whose draft is discarded.

        Override it if that is cheaper than drafting.
        """
        return self.propose(target, params, state, context, draw)[1]

    def update(self, target: Target, params: Params, state: State, outcome: Outcome) -> State:
        """Returns the state after a round."""
        return state


@dataclass(frozen=True)
class ChainDrafter(Drafter):
    """Drafts a chain of up to `num_tokens` tokens."""

    num_tokens: int = setting(10, at_least=1)
    """Maximum number of drafted tokens."""

    @property
    def num_nodes(self) -> int:
        return self.num_tokens + 1


@dataclass(frozen=True, kw_only=True)
class CopyingDrafter(ChainDrafter):
    """Drafts a chain that it copies from the text, longer after a long match."""

    max_tokens: int = setting(0, at_least=0)
    """Maximum number after a long match: 5 equal tokens before the copy and before its source. It
    must exceed num_tokens to have an effect."""

    @property
    def longest(self) -> int:
        """Tokens of the longest chain."""
        return max(self.num_tokens, self.max_tokens)

    @property
    def num_nodes(self) -> int:
        return self.longest + 1

    @property
    def pass_widths(self) -> tuple[int, ...] | None:
        return (1, self.num_tokens + 1) if self.max_tokens > self.num_tokens else None

    def copied(
        self, context: Context, start: Int[Array, " B"], has_match: Bool[Array, " B"]
    ) -> DraftTree:
        """Returns a chain of the committed tokens from `start` on; an empty one without a match.

        The token before `start` counts as the source of the root.
        """
        source = start[:, None] - 1 + jnp.arange(self.longest + 1)[None, :]
        drafted = jnp.take_along_axis(context.tokens, source[:, 1:], axis=1, mode="clip")
        most = self.num_tokens
        if self.max_tokens > most:
            most = jnp.where(has_long_match(source[:, 0], context), self.max_tokens, most)
        num_left = jnp.clip(context.length - start, 0, most)
        tree = chain(context.root, drafted, jnp.where(has_match, num_left, 0))
        return replace(tree, source=source)


def has_long_match(source: Int[Array, " B"], context: Context) -> Bool[Array, " B"]:
    """Whether the `LONG_MATCH` tokens up to position `source` equal the last committed ones."""
    back = jnp.arange(LONG_MATCH)[None, :]
    here, there = (
        jnp.take_along_axis(context.tokens, jnp.maximum(end[:, None] - back, 0), axis=1)
        for end in (source, context.length - 1)
    )
    return jnp.all(here == there, axis=1) & (source >= LONG_MATCH - 1)
