"""Processors: pure functions that change each node's logits, from the text that ends with it.

All verification rules and plain decoding apply the same functions, so that the target's token
after a node depends on the text that leads to it, never on the rest of the draft. A processor's
state belongs to the committed text and advances over the tokens that a round commits; the effect of
drafted tokens is computed from the tree in every pass.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.core.errors import check_ids
from specjax.core.pytree import pytree, static
from specjax.decoding.prompt import Prompt
from specjax.decoding.tree import DraftTree, ancestors

State = Any  # a pytree that the processor defines; each leaf begins with the batch
Step = Callable[[State, Int[Array, ""]], State]  # the state of one sequence after one more token

NO_TOKEN = -1  # before the start of the text
ANY_TOKEN = -2


@pytree
class Nodes:
    """The nodes of a pass, each with the text that leads to it."""

    tree: DraftTree
    tokens: Int[Array, "B S"]  # committed; meaningless beyond length
    length: Int[Array, " B"]  # root included
    prompt_length: Int[Array, " B"]
    max_depth: int = static()
    eos: tuple[int, ...] = static()

    @property
    def num_new(self) -> Int[Array, "B N"]:
        """New tokens of the text that ends at each node."""
        return (self.length - self.prompt_length)[:, None] + self.tree.depth

    @property
    def above(self) -> Bool[Array, "B N N"]:
        """Entry [b, i, j]: whether node j is drafted, and is node i or one of its ancestors."""
        return ancestors(self.tree, self.max_depth) & (self.tree.depth > 0)[:, None, :]

    def last(self, count: int) -> Int[Array, "B N C"]:
        """Returns the last tokens of the text that ends at each node, the node's own last."""
        depth, tokens = self.tree.depth, []
        node = jnp.broadcast_to(jnp.arange(self.tree.num_nodes), depth.shape)
        for distance in range(count):
            place = self.length[:, None] - 1 + depth - distance
            committed = jnp.take_along_axis(self.tokens, jnp.maximum(place, 0), axis=1)
            committed = jnp.where(place < 0, NO_TOKEN, committed)
            drafted = jnp.take_along_axis(self.tree.tokens, node, axis=1)
            tokens.append(jnp.where(distance < depth, drafted, committed))
            node = jnp.maximum(jnp.take_along_axis(self.tree.parents, node, axis=1), 0)
        return jnp.stack(tokens[::-1], axis=-1)

    def states(self, step: Step, state: State) -> State:
        """Returns the state at each node, `[B, N, ...]`, from the state at the root, `[B, ...]`."""
        shape, parents = self.tree.tokens.shape, jnp.maximum(self.tree.parents, 0)
        states = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf[:, None], (*shape, *leaf.shape[1:])), state
        )

        def one_deeper(depth: Int[Array, ""], states: State) -> State:
            before = jax.tree.map(lambda leaf: jax.vmap(lambda x, at: x[at])(leaf, parents), states)
            after = jax.vmap(jax.vmap(step))(before, self.tree.tokens)
            return _where(self.tree.depth == depth, after, states)

        return lax.fori_loop(1, self.max_depth + 1, one_deeper, states)


def advanced(step: Step, state: State, tokens: Int[Array, "B P"], count: Int[Array, " B"]) -> State:
    """Returns the state after the first `count[b]` of the tokens."""

    def one_more(place: Int[Array, ""], state: State) -> State:
        return _where(place < count, jax.vmap(step)(state, tokens[:, place]), state)

    return lax.fori_loop(0, tokens.shape[1], one_more, state)


def _where(condition: Bool[Array, "..."], new: State, old: State) -> State:
    def choose(new: Array, old: Array) -> Array:
        missing = new.ndim - condition.ndim
        return jnp.where(condition.reshape(*condition.shape, *[1] * missing), new, old)

    return jax.tree.map(choose, new, old)


@dataclass(frozen=True)
class Processor(ABC):
    """Changes the logits after each node. Subclasses are frozen, hashable dataclasses.

    A processor with a small state per node, such as an automaton, defines `init` and a `step` from
    state and token to state: `apply` reads `nodes.states(self.step, state)`, and `commit` returns
    `advanced(self.step, state, tokens, count)`. `params` are arrays of the request, from
    `Params.processors`; those of `Sampling`'s own controls are its `SamplingValues`, if any.
    """

    def check(self, params: Any, vocab_size: int, eos: tuple[int, ...]) -> None:  # noqa: B027
        """Raises SpecjaxError if settings or `params` do not fit a vocabulary."""

    def init(self, params: Any, prompt: Prompt, vocab_size: int) -> State:
        """Returns the state after the prompt."""
        return None

    @abstractmethod
    def apply(
        self, params: Any, logits: Float[Array, "B N V"], state: State, nodes: Nodes
    ) -> Float[Array, "B N V"]:
        """Returns the changed logits for the token after each node; `state` is the root's."""

    def commit(
        self, params: Any, state: State, tokens: Int[Array, "B P"], count: Int[Array, " B"]
    ) -> State:
        """Returns the state after the first `count[b]` of the tokens join the text."""
        return state


@pytree
class Controls:
    """The processors of a round, with all that they read."""

    tokens: Int[Array, "B S"]
    length: Int[Array, " B"]
    prompt_length: Int[Array, " B"]
    states: tuple[State, ...]
    params: tuple[Any, ...]
    processors: tuple[Processor, ...] = static()
    eos: tuple[int, ...] = static()

    def apply(
        self, logits: Float[Array, "B N V"], tree: DraftTree, max_depth: int
    ) -> Float[Array, "B N V"]:
        """Returns float32 logits that all processors have changed, one after the other."""
        nodes = Nodes(tree, self.tokens, self.length, self.prompt_length, max_depth, self.eos)
        logits = logits.astype(jnp.float32)
        for processor, params, state in zip(self.processors, self.params, self.states, strict=True):
            logits = processor.apply(params, logits, state, nodes)
        return logits


# ---- The settings of `Sampling` -----------------------------------------------------------------
#
# Their `params` are the `SamplingValues` of the sequences, or None: then all share their fields.


@dataclass(frozen=True)
class LogitBias(Processor):
    """Adds a number to the logits of some tokens."""

    bias: tuple[tuple[int, float], ...]

    def check(self, params, vocab_size, eos):
        check_ids("logit_bias", [token for token, _ in self.bias], vocab_size)

    def apply(self, params, logits, state, nodes):
        if params is not None:
            return logits + params.logit_bias[:, None]
        bias = np.zeros(logits.shape[-1:], np.float32)
        for token, value in self.bias:
            bias[token] = value
        return logits + bias[None, None]


@dataclass(frozen=True)
class Penalties(Processor):
    """Changes the logits of tokens that the text holds already.

    The repetition penalty divides positive logits of tokens of prompt and output, and multiplies
    negative ones. The frequency penalty is subtracted for every occurrence in the output, the
    presence penalty once.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    def init(self, params, prompt, vocab_size):
        batch, width = prompt.tokens.shape
        counts = jnp.zeros((batch, vocab_size), jnp.int32)
        if self.repetition == 1:
            return counts, None
        is_prompt = jnp.arange(width)[None, :] < prompt.length[:, None]
        return counts, _add_counts(counts, prompt.tokens, is_prompt) > 0

    def apply(self, params, logits, state, nodes):
        # One pass over the vocabulary with the committed counts, which all nodes share; then the
        # few tokens above each node again, with their own counts.
        committed = jax.tree.map(lambda leaf: leaf[:, None], state)
        tokens, above = nodes.tree.tokens, nodes.above
        same = tokens[:, :, None] == tokens[:, None, :]
        repeats = jnp.einsum("bij,bjk->bik", above.astype(jnp.int32), same.astype(jnp.int32))
        counts, in_prompt = jax.tree.map(
            lambda leaf: jnp.take_along_axis(leaf, tokens, axis=1)[:, None], state
        )
        at_tokens = jax.vmap(lambda logits, tokens: logits[:, tokens])(logits, tokens)
        corrected = self._penalised(params, at_tokens, counts + repeats, in_prompt)
        place = jnp.where(above, tokens[:, None], logits.shape[-1])
        put = jax.vmap(jax.vmap(lambda old, at, new: old.at[at].set(new, mode="drop")))
        return put(self._penalised(params, logits, *committed), place, corrected)

    def commit(self, params, state, tokens, count):
        counts, in_prompt = state
        is_kept = jnp.arange(tokens.shape[1])[None, :] < count[:, None]
        return _add_counts(counts, tokens, is_kept), in_prompt

    def _penalised(
        self, params: Any, logits: Array, counts: Array, in_prompt: Array | None
    ) -> Array:
        r: Any = np.float32(self.repetition)
        presence: Any = self.presence
        frequency: Any = self.frequency
        if params is not None:
            names = "repetition_penalty", "presence_penalty", "frequency_penalty"
            r, presence, frequency = (getattr(params, name)[:, None, None] for name in names)
        if in_prompt is not None:
            is_seen = (counts > 0) | in_prompt
            smaller = logits * (1 / r)  # a constant's reciprocal and a sequence's round equally
            logits = jnp.where(is_seen, jnp.where(logits < 0, logits * r, smaller), logits)
        return logits - jnp.where(counts > 0, presence, 0.0) - frequency * counts


@dataclass(frozen=True)
class BadWords(Processor):
    """Bans a word's last token after the rest of it; a word that is only EOS is not banned."""

    words: tuple[tuple[int, ...], ...]

    def check(self, params, vocab_size, eos):
        check_ids("bad_words", [token for word in self.words for token in word], vocab_size)

    def apply(self, params, logits, state, nodes):
        ends = {(token,) for token in nodes.eos}
        words = [word for word in self.words if word not in ends]
        width = max(map(len, words), default=1) - 1
        before = np.full((len(words), width), ANY_TOKEN)
        for number, word in enumerate(words):
            before[number, width - len(word) + 1 :] = word[:-1]
        is_next = jnp.ones((*logits.shape[:-1], len(words)), bool)
        if width:
            before = before[None, None]  # [1, 1, words, width]
            same = (nodes.last(width)[:, :, None] == before) | (before == ANY_TOKEN)
            is_next = jnp.all(same, axis=-1)
        last = np.asarray([word[-1] for word in words], np.int32)
        return _banned(logits, last, is_next)


@dataclass(frozen=True)
class MinNewTokens(Processor):
    """Bans end tokens until the text has some new ones."""

    count: int

    def apply(self, params, logits, state, nodes):
        count = self.count if params is None else params.min_new_tokens[:, None]
        is_short = (nodes.num_new < count)[..., None]
        return _banned(logits, np.asarray(nodes.eos, np.int32), is_short)


def _banned(
    logits: Float[Array, "B N V"], tokens: Int[np.ndarray, " W"], is_banned: Bool[Array, "B N #W"]
) -> Float[Array, "B N V"]:
    """Returns logits without the banned tokens; a few writes, not a pass over the vocabulary."""
    place = jnp.where(is_banned, tokens, logits.shape[-1])
    return jax.vmap(jax.vmap(lambda row, at: row.at[at].set(-jnp.inf, mode="drop")))(logits, place)


def _add_counts(
    counts: Int[Array, "B V"], tokens: Int[Array, "B P"], is_counted: Bool[Array, "B P"]
) -> Int[Array, "B V"]:
    return jax.vmap(lambda old, at, new: old.at[at].add(new))(
        counts, tokens, is_counted.astype(jnp.int32)
    )
