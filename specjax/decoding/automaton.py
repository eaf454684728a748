"""A grammar as arrays: an automaton over tokens, which advances along the nodes of a draft tree.

Tokens with the same transition in every state share a class, so that the table has a column per
class. An end token is allowed in final states alone.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from specjax.core.errors import SpecjaxError
from specjax.core.pytree import pytree
from specjax.decoding.byte_automaton import DEAD, FINAL, byte_automaton
from specjax.decoding.processors import Processor, advanced

FREE = -1
MAX_RUN = 64  # bytes to look ahead
BUCKET = 64  # states and classes are padded to powers of two from here, to compile few programs


@pytree
class Automaton:
    """The tokens that may follow in each state. State 0 is the start. V: vocabulary."""

    next_state: Int[Array, "S C"]  # after a token of each class; DEAD: it is not allowed
    class_of: Int[Array, " V"]
    likely: Int[Array, " S"]  # the token that comes next where there is hardly a choice, or FREE

    def after(self, state: Int[Array, "..."], token: Int[Array, "..."]) -> Int[Array, "..."]:
        """Returns the state after one more token."""
        state = jnp.where(state == DEAD, DEAD, self.next_state[state, self.class_of[token]])
        return state.astype(jnp.int32)

    def allowed(self, state: Int[Array, "..."]) -> Bool[Array, "... V"]:
        """Whether each token may come next; all may after a text that is dead already."""
        return (self.next_state[state] != DEAD)[..., self.class_of] | (state == DEAD)[..., None]

    def likely_after(self, state: Int[Array, "..."]) -> Int[Array, "..."]:
        """Returns the token that is likely to come next, or FREE."""
        return jnp.where(state == DEAD, FREE, self.likely[state])


@dataclass(frozen=True)
class Grammar(Processor):
    """Bans the tokens that a grammar does not allow; its params are an `Automaton`."""

    def check(self, params, vocab_size, eos):
        if not isinstance(params, Automaton) or params.class_of.shape != (vocab_size,):
            raise SpecjaxError(
                "the processor Grammar needs the automaton of this target as its entry of "
                "Params.processors; pass the one that specjax.load_grammar returned"
            )
        if not eos:
            raise SpecjaxError("a grammar ends with an end token; pass eos=target.eos")

    def init(self, params, prompt, vocab_size):
        return jnp.zeros(prompt.length.shape, jnp.int32)

    def apply(self, params, logits, state, nodes):
        return jnp.where(params.allowed(nodes.states(params.after, state)), logits, -jnp.inf)

    def commit(self, params, state, tokens, count):
        return advanced(params.after, state, tokens, count)


def token_automaton(
    regex: str,
    token_bytes: Mapping[int, bytes],
    eos: tuple[int, ...],
    vocab_size: int,
    encode: Callable[[str], Sequence[int]] = lambda text: (),
) -> Automaton:
    """Builds the automaton of the texts that match a regular expression as a whole.

    Args:
        regex: in the syntax of Rust's `regex`, without anchors, look-around and back references.
        token_bytes: the bytes of each token that may be used.
        eos: the end tokens.
        vocab_size: of the target; other tokens are never allowed.
        encode: how the target writes a text in tokens, for `Automaton.likely`.
    """
    table = byte_automaton(regex)
    dead = len(table)
    is_final = np.append(table[:, FINAL] == 1, False)
    # The dead state leads to itself, so that walks need no condition.
    table = np.pad(np.where(table == DEAD, dead, table), ((0, 1), (0, 0)), constant_values=dead)
    usable = {
        token: text
        for token, text in token_bytes.items()
        if text and token < vocab_size and token not in eos
    }
    class_of, examples, reached = _classes(table, usable, vocab_size)
    columns = [_walk(table, usable.get(token), dead) for token in examples]
    ends = np.where(is_final, np.arange(dead + 1), dead)
    class_of[list(eos)] = len(columns)
    after = np.stack([*columns, ends], axis=1)
    after = np.where(_can_end(after, is_final)[after], after, dead)
    number = np.full(dead + 1, DEAD)
    number[reached] = np.arange(len(reached))
    after = number[after[reached]]
    if not (after[0] != DEAD).any():
        raise SpecjaxError(f"no sequence of the target's tokens matches {regex[:60]!r}; relax it")
    likely = _likely(after, class_of)
    for place, (text, is_whole) in enumerate(_runs(table, is_final, reached)):
        first, *others = [*encode(text.decode(errors="ignore")), FREE]
        # The last token of a run may merge with what follows.
        is_sure = len(others) > (0 if is_whole else 1) and first in usable
        if is_sure and text.startswith(usable[first]) and likely[place] == FREE:
            likely[place] = first
    missing = [(0, max(BUCKET, 1 << (size - 1).bit_length()) - size) for size in after.shape]
    after = np.pad(after, missing, constant_values=DEAD)
    likely = np.pad(likely, missing[0], constant_values=FREE)
    arrays = after.astype(np.int16), class_of.astype(np.int32), likely.astype(np.int32)
    return Automaton(*map(jnp.asarray, arrays))


def _likely(after: np.ndarray, class_of: np.ndarray) -> np.ndarray:
    """Returns the only token that is allowed in each state, or FREE."""
    num_allowed = (after != DEAD) * np.bincount(class_of, minlength=after.shape[1])
    token_of = np.zeros(after.shape[1], np.int64)
    token_of[class_of] = np.arange(len(class_of))
    is_forced = np.sum(num_allowed, axis=1) == 1
    return np.where(is_forced, token_of[np.argmax(num_allowed, axis=1)], FREE)


def _runs(
    table: np.ndarray, is_final: np.ndarray, states: list[int]
) -> Iterator[tuple[bytes, bool]]:
    """Yields the bytes that follow each state up to a choice, and whether the end follows.

    Where a space is optional, it is taken after ":" and "," only.
    """
    bytes_after = table[:, :FINAL]
    is_live = _can_end(bytes_after, is_final)[bytes_after]
    for state in states:
        text = b""
        while not is_final[state] and len(text) < MAX_RUN:
            options = np.flatnonzero(is_live[state]).tolist()
            if len(options) == 2 and ord(" ") in options:
                is_spaced = text[-1:] in (b":", b",")
                options = [byte for byte in options if (byte == ord(" ")) == is_spaced]
            if len(options) != 1:
                break
            text, state = text + bytes(options), bytes_after[state, options[0]]
        yield text, bool(is_final[state] and not is_live[state].any())


def _classes(
    table: np.ndarray, token_bytes: Mapping[int, bytes], vocab_size: int
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Returns the class of each token, a token of each class, and the states that tokens reach."""
    dead = len(table) - 1
    prefixes = {text[:end] for text in token_bytes.values() for end in range(1, len(text) + 1)}
    ordered = [b"", *sorted(prefixes, key=len)]
    index = {prefix: number for number, prefix in enumerate(ordered)}
    parents = np.array([index[prefix[:-1]] for prefix in ordered])
    last = np.array([prefix[-1] if prefix else 0 for prefix in ordered])
    lengths = np.array([len(prefix) for prefix in ordered])
    borders = np.searchsorted(lengths, np.arange(1, lengths[-1] + 2))
    levels = [slice(*pair) for pair in itertools.pairwise(borders)]
    node_of = np.full(vocab_size, len(ordered))  # beyond the last: always dead
    node_of[list(token_bytes)] = [index[text] for text in token_bytes.values()]

    class_of, examples = np.zeros(vocab_size, np.int64), np.zeros(1, np.int64)
    reached, seen = [0], {0, dead}
    states = np.full(len(ordered) + 1, dead)
    for state in reached:  # which grows in this loop
        states[0] = state
        for level in levels:
            states[level] = table[states[parents[level]], last[level]]
        row = states[node_of]
        if np.any(row != row[examples][class_of]):
            pairs = class_of * (dead + 1) + row
            _, examples, class_of = np.unique(pairs, return_index=True, return_inverse=True)
        fresh = set(row[examples].tolist()) - seen
        seen |= fresh
        reached += sorted(fresh)
    return class_of, examples, reached


def _walk(table: np.ndarray, text: bytes | None, dead: int) -> np.ndarray:
    """Returns the state after a text, from every state."""
    if text is None:
        return np.full(len(table), dead)
    states = np.arange(len(table))
    for byte in text:
        states = table[states, byte]
    return states


def _can_end(after: np.ndarray, is_final: np.ndarray) -> np.ndarray:
    """Whether some sequence of tokens leads from each state to a final one."""
    can_end, before = is_final, None
    while before is None or np.any(can_end != before):
        can_end, before = can_end | np.any(can_end[after], axis=1), can_end
    return can_end
