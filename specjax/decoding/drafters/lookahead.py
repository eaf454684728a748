"""Lookahead decoding: drafts n-grams that the target guessed in earlier passes.

Besides the draft tree, a pass holds a window of probe tokens: guesses at several future positions,
refined in parallel as in Jacobi iteration. The resulting n-grams go to a pool, and those that begin
with the root are drafted.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from specjax.core.pytree import pytree
from specjax.core.ranking import best_token
from specjax.core.settings import setting
from specjax.decoding.drafter import Context, Drafter, Outcome, Params, Probe, Proposal, Start
from specjax.decoding.prompt import Prompt
from specjax.decoding.sampling import Draw
from specjax.decoding.tree import merge_paths
from specjax.models.target import Taps, Target

EMPTY = -1  # marks an entry of the pool that holds no n-gram
PROMPT_CHUNK = 32  # n-grams of the prompt inserted at once


@pytree
class LookaheadState:
    """Window and pool. W: window length; L = N - 2: levels above level 0; C = W - 1 + L."""

    ahead: Int[Array, "B C"]  # level 0 from column 1 on; W - 1 once all levels are filled
    levels: Int[Array, "B L W"]  # levels 1 to L
    filled: Int[Array, " B"]  # how many of them
    pool: Int[Array, "B V G T"]  # by first token: its n-grams' T = N - 1 others, newest first


@dataclass(frozen=True)
class Lookahead(Drafter):
    """Lookahead decoding: Jacobi iteration alongside a tree of earlier n-grams; no weights.

    Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding".

    The window has levels 0 to N - 2, N = `ngram_length`. Column c of level l is a guess at the
    token l + c positions after the root; it sees the text, level 0 up to column c (column 0 is the
    root itself) and column c of levels 1 to l. The target's tokens after the last level complete
    one n-gram per column and become the last level, while level 0 is dropped. The first N - 2
    rounds fill one level each; level 0 starts as tokens of the prompt.

    The tree holds the n-grams of the root, newest first. The pool keeps `num_guesses` per first
    token and drops the oldest; `pool_from_prompt` fills it with the prompt's n-grams first.

    As in the published greedy setting, the window slides one position per round, however many
    tokens were accepted. Differences from the published code: an n-gram that matches entirely adds
    all its N - 1 tokens and the bonus (theirs loses one); n-grams with a common prefix share nodes;
    drafting starts in the first rounds, which leave out unread columns; n-grams of the generated
    text come from the window alone; sampling follows `Sampling.verification`.
    """

    ngram_length: int = setting(5, at_least=3)
    """Tokens of an n-gram."""
    window_length: int = setting(7, at_least=1)
    """Positions after the root to guess at once."""
    num_guesses: int = setting(7, at_least=1)
    """N-grams to keep and verify per first token."""
    pool_from_prompt: bool = False
    """Start with the n-grams of the prompt; true or false."""

    taps = Taps(logits=True)

    @property
    def num_levels(self) -> int:
        """Levels of the window above level 0."""
        return self.ngram_length - 2

    @property
    def max_depth(self) -> int:
        return self.ngram_length - 1

    @property
    def num_nodes(self) -> int:
        return 1 + self.num_guesses * self.max_depth

    @property
    def num_probes(self) -> int:
        return self.window_length - 1 + self.num_levels * self.window_length

    def init(self, start: Start) -> LookaheadState:
        prompt, batch = start.prompt, len(start.prompt.length)
        shape = (batch, start.target.config.vocab_size, self.num_guesses, self.max_depth)
        pool = jnp.full(shape, EMPTY, jnp.int32)
        if self.pool_from_prompt:
            pool = insert_text(pool, prompt.tokens, prompt.length)
        return LookaheadState(
            ahead=self._any_tokens(prompt),
            levels=jnp.zeros((batch, self.num_levels, self.window_length), jnp.int32),
            filled=jnp.zeros((batch,), jnp.int32),
            pool=pool,
        )

    def propose(
        self, target: Target, params: Params, state: LookaheadState, context: Context, draw: Draw
    ) -> tuple[Proposal, LookaheadState]:
        guesses = jax.vmap(lambda pool, token: pool[token])(state.pool, context.root)
        lengths = jnp.where(guesses[..., 0] == EMPTY, 0, self.max_depth)
        tree = merge_paths(context.root, guesses, lengths, self.num_nodes)
        return Proposal(tree, self._probe(state)), state

    def update(
        self, target: Target, params: Params, state: LookaheadState, outcome: Outcome
    ) -> LookaheadState:
        # The window takes the most likely token at any temperature, as published: the noise depends
        # on the position, and an n-gram is drafted at other positions.
        newest = self._after_newest_level(state, outcome)
        is_full = state.filled == self.num_levels
        root = outcome.tree.tokens[:, :1]
        first = jnp.concatenate([root, state.ahead[:, : self.window_length - 1]], axis=1)
        rest = jnp.concatenate([state.levels, newest[:, None]], axis=1).swapaxes(1, 2)
        pool = insert(state.pool, first, rest, jnp.broadcast_to(is_full[:, None], first.shape))
        ahead, levels = self._slide(state, newest)
        return LookaheadState(ahead, levels, jnp.minimum(state.filled + 1, self.num_levels), pool)

    def _any_tokens(self, prompt: Prompt) -> Int[Array, "B C"]:
        """Returns the initial level 0: random tokens of the prompt, independent of padding."""
        count = self.window_length - 1 + self.num_levels
        share = jax.random.uniform(jax.random.key(0), (count,))
        at = (share[None, :] * prompt.length[:, None]).astype(jnp.int32)
        at = jnp.minimum(at, prompt.length[:, None] - 1)  # the product may be rounded up
        return jnp.take_along_axis(prompt.tokens, at, axis=1)

    def _probe(self, state: LookaheadState) -> Probe:
        """Returns the window as probe tokens: level 0 from column 1 on, then level 1, and so on.

        While the window fills, it slides one position per round, so with `lag` levels missing the
        filled levels 1 and up stand `lag` columns to the right of their final place, and level 0
        extends `lag` columns further. With W = 3 columns and L = 2 levels (`.` is left out):

            none filled (lag 2)   one filled (lag 1)   all filled (lag 0)
            level 0: . c1 c2 c3 c4    . c1 c2 c3           . c1 c2
            level 1:                      c1 c2 c3         c0 c1 c2
            level 2:                                       c0 c1 c2

        The `lag` extra tokens of level 0 take the place of levels that are still empty, starting
        from the end.
        """
        window, levels = self.window_length, self.num_levels
        batch, lag = state.filled.shape[0], (levels - state.filled)[:, None]
        final_level = np.repeat(np.arange(levels + 1), window)[None, 1:]
        final_column = np.tile(np.arange(window), levels + 1)[None, 1:]
        from_end = np.arange(self.num_probes)[None, ::-1]
        is_borrowed = from_end < lag
        level = jnp.where(is_borrowed, 0, final_level)
        shifted = final_column + lag * (final_level > 0)
        column = jnp.where(is_borrowed, window + from_end, shifted)
        tokens = [state.ahead[:, : window - 1], state.levels.reshape(batch, -1)]
        beyond = jnp.take(state.ahead, window - 1 + from_end[0], axis=1, mode="clip")
        return Probe(
            tokens=jnp.where(is_borrowed, beyond, jnp.concatenate(tokens, axis=1)),
            offset=level + column,
            anchor=jnp.zeros_like(level),  # the root
            visible=_window_visible(level, column),
        )

    def _after_newest_level(self, state: LookaheadState, outcome: Outcome) -> Int[Array, "B W"]:
        """Returns the target's token after each column of the newest filled level."""
        window, levels = self.window_length, self.num_levels
        columns = np.arange(window)
        outer = columns + levels  # columns of level 0 before any level is filled
        first = np.where(outer < window, outer - 1, self.num_probes - 1 - (outer - window))
        later = (state.filled * window)[:, None] - 1 + columns[None, :]
        probes = jnp.where(state.filled[:, None] == 0, first[None, :], later)  # order of `_probe`
        logits = jnp.take_along_axis(outcome.probe_logits(), probes[..., None], axis=1)
        return best_token(logits)

    def _slide(
        self, state: LookaheadState, newest: Int[Array, "B W"]
    ) -> tuple[Int[Array, "B C"], Int[Array, "B L W"]]:
        """Slides the window one position; `newest` is the next level, or the last of a full window.

        A token of the window keeps its position in the text if the root moves by one.
        """
        is_full = state.filled == self.num_levels
        upward = jnp.concatenate([state.levels[:, 1:], newest[:, None]], axis=1)
        is_next = jnp.arange(self.num_levels)[None, :] == state.filled[:, None]
        further = jnp.where(is_next[..., None], newest[:, None], state.levels)
        level_1 = jnp.pad(state.levels[:, 0, 1:], ((0, 0), (0, self.num_levels)))
        ahead = jnp.where(is_full[:, None], level_1, jnp.roll(state.ahead, -1, axis=1))
        return ahead, jnp.where(is_full[:, None, None], upward, further)


def _window_visible(level: Int[Array, "B R"], column: Int[Array, "B R"]) -> Bool[Array, "B R R"]:
    """Whether probe token i sees token j, at entry [b, i, j]: see `Lookahead`."""
    own_level, own_column = level[..., None], column[..., None]
    seen_level, seen_column = level[:, None, :], column[:, None, :]
    in_level_0 = (seen_level == 0) & (seen_column <= own_column)
    below = (seen_level > 0) & (seen_level <= own_level) & (seen_column == own_column)
    return in_level_0 | below


def _insert(
    pool: Int[Array, "V G T"],
    first: Int[Array, " C"],
    rest: Int[Array, "C T"],
    is_used: Bool[Array, " C"],
) -> Int[Array, "V G T"]:
    """Inserts the n-grams `first + rest` that are used, in order.

    Each bucket then holds the last G distinct n-grams of its token, newest first. All are computed
    at once (n-grams with the same first token compute the same bucket) and written in one scatter.
    """
    old = pool[first]
    new = jnp.broadcast_to(rest[None, ::-1], (first.shape[0], *rest.shape))
    is_new = (is_used[None, :] & (first[:, None] == first[None, :]))[:, ::-1]
    entries = jnp.concatenate([new, old], axis=1)  # newest first
    exists = jnp.concatenate([is_new, old[..., 0] != EMPTY], axis=1)
    same = jnp.all(entries[:, :, None] == entries[:, None], axis=-1) & exists[:, None, :]
    is_repeated = jnp.any(jnp.tril(same, -1), axis=-1)
    is_kept = exists & ~is_repeated
    order = jnp.argsort(~is_kept, axis=1, stable=True)[:, : pool.shape[1]]
    chosen = jnp.take_along_axis(entries, order[..., None], axis=1)
    is_filled = jnp.take_along_axis(is_kept, order, axis=1)
    buckets = jnp.where(is_filled[..., None], chosen, EMPTY)
    return pool.at[jnp.where(is_used, first, pool.shape[0])].set(buckets, mode="drop")


insert = jax.vmap(_insert)  # for every sequence


def insert_text(
    pool: Int[Array, "B V G T"], tokens: Int[Array, "B P"], length: Int[Array, " B"]
) -> Int[Array, "B V G T"]:
    """Inserts all n-grams of the first `length` tokens."""
    reach = pool.shape[3]
    padded = jnp.pad(tokens, ((0, 0), (0, PROMPT_CHUNK + reach)))
    starts = jnp.arange(PROMPT_CHUNK)

    def insert_chunk(index, pool):
        start = index * PROMPT_CHUNK
        part = lax.dynamic_slice_in_dim(padded, start, PROMPT_CHUNK + reach, axis=1)
        ngrams = part[:, starts[:, None] + jnp.arange(reach + 1)[None, :]]
        is_whole = start + starts[None, :] + reach < length[:, None]
        return insert(pool, ngrams[..., 0], ngrams[..., 1:], is_whole)

    return lax.fori_loop(0, -(-jnp.max(length) // PROMPT_CHUNK), insert_chunk, pool)
