"""Prompt lookup (PLD, Saxena 2023): drafts the continuation of an earlier n-gram.

Guesses are those of LogitSpec (2025): tokens that were likely in place of the root are often right
after it, so each of them extends the n-gram that is looked up.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specjax.core.ranking import best_tokens
from specjax.core.settings import check_at_most, setting
from specjax.decoding.drafter import Context, CopyingDrafter, Outcome, Params, Proposal, Start
from specjax.decoding.sampling import Draw
from specjax.decoding.tree import merge_paths
from specjax.models.target import Taps, Target

EMPTY = -1  # marks a guess that is not known
Guesses = Int[Array, "B G"] | None  # the state: likely tokens, the most likely first


@dataclass(frozen=True)
class PromptLookup(CopyingDrafter):
    """PLD: no weights; one chain of `num_tokens`, and with guesses a tree.

    As published, the first occurrence of the longest n-gram wins, and only occurrences followed by
    `num_tokens` tokens count, unless `allow_shorter`. With a large `max_ngram` and the last
    occurrence this is longest suffix matching. An occurrence may overlap the n-gram that is looked
    up, which the published code rules out; this matters only if at most `max_ngram` tokens must
    follow.
    """

    max_ngram: int = setting(3, at_least=1)
    """Longest n-gram to look up, in tokens."""
    min_ngram: int = setting(1, at_least=1)
    """Shortest n-gram to look up; no longer than max_ngram."""
    allow_shorter: bool = False
    """Draft the tokens there are if fewer than num_tokens follow; true or false."""
    occurrence: str = setting("first", choices=("first", "last"))
    """Which of several longest matches to copy from."""
    num_guesses: int = setting(0, at_least=0)
    """Tokens to draft after the root besides the copy: the most likely in place of the root."""
    guess_length: int = setting(3, at_least=1)
    """Tokens of a guess with its copied continuation."""

    @property
    def taps(self) -> Taps:
        return Taps(logits=self.num_guesses > 0)

    @property
    def num_nodes(self) -> int:
        return 1 + self.longest + self.num_guesses * self.guess_length

    @property
    def max_depth(self) -> int:
        return max(self.longest, self.guess_length if self.num_guesses else 0)

    @property
    def pass_widths(self) -> tuple[int, ...] | None:
        return None if self.num_guesses else super().pass_widths

    def init(self, start: Start) -> Guesses:
        shape = len(start.prompt.length), self.num_guesses
        return jnp.full(shape, EMPTY, jnp.int32) if self.num_guesses else None

    def check_settings(self) -> None:
        check_at_most("min_ngram", self.min_ngram, "max_ngram", self.max_ngram)

    def propose(
        self, target: Target, params: Params, state: Guesses, context: Context, draw: Draw
    ) -> tuple[Proposal, Guesses]:
        find = partial(self._find, num_tokens=self.num_tokens)
        start, has_match = jax.vmap(find)(context.tokens, context.length)
        copied = self.copied(context, start, has_match)
        if state is None:
            return Proposal(copied), state
        guesses, lengths = jax.vmap(self._continued)(context.tokens, context.length, state)
        reach = self.max_depth
        pad = lambda paths: jnp.pad(paths, ((0, 0), (0, 0), (0, reach - paths.shape[2])))  # noqa: E731
        paths = jnp.concatenate([pad(copied.tokens[:, None, 1:]), pad(guesses)], axis=1)
        lengths = jnp.concatenate([copied.num_valid()[:, None] - 1, lengths], axis=1)
        return Proposal(merge_paths(context.root, paths, lengths, self.num_nodes)), state

    def update(self, target: Target, params: Params, state: Guesses, outcome: Outcome) -> Guesses:
        if state is None:
            return state
        assert outcome.output.logits is not None
        last = outcome.verification.num_accepted[:, None]
        node = jnp.take_along_axis(outcome.verification.path, last, axis=1)
        logits = jnp.take_along_axis(outcome.output.logits, node[..., None], axis=1)[:, 0]
        likely = best_tokens(logits, self.num_guesses + 1)[1]
        # The root comes last, and is left out.
        order = jnp.argsort(likely == outcome.context.root[:, None], axis=1, stable=True)
        return jnp.take_along_axis(likely, order, axis=1)[:, :-1]

    def _continued(
        self, tokens: Int[Array, " S"], length: Int[Array, ""], guesses: Int[Array, " G"]
    ) -> tuple[Int[Array, "G L"], Int[Array, " G"]]:
        """Returns each guess with the continuation of the n-gram that it ends, and their length."""

        def of_guess(guess: Int[Array, ""]) -> tuple[Int[Array, " L"], Int[Array, ""]]:
            text = tokens.at[length].set(guess)
            start, has_match = self._find(text, length + 1, self.guess_length - 1)
            steps = jnp.arange(self.guess_length - 1)
            count = jnp.clip(length + 1 - start, 0, self.guess_length - 1)
            path = jnp.append(guess, jnp.take(text, start + steps, mode="clip"))
            return path, jnp.where(guess == EMPTY, 0, 1 + has_match * count)

        return jax.vmap(of_guess)(guesses)

    def _find(
        self, tokens: Int[Array, " S"], length: Int[Array, ""], num_tokens: int
    ) -> tuple[Int[Array, ""], Bool[Array, ""]]:
        """Returns the start of the drafted continuation, and whether there is one.

        Without `allow_shorter` it has `num_tokens` tokens.
        """
        ends = jnp.arange(tokens.shape[0])  # last token of a candidate n-gram
        same = jnp.stack(
            [
                (jnp.roll(tokens, back) == tokens[length - 1 - back])
                & (ends >= back)
                & (back < length)
                for back in range(self.max_ngram)
            ]
        )
        run = jnp.sum(jnp.cumprod(same, axis=0), axis=0)  # equal tokens, counted from the end
        continuation = 1 if self.allow_shorter else num_tokens
        is_candidate = (run >= self.min_ngram) & (ends + continuation < length)
        run = jnp.where(is_candidate, run, 0)
        best = jnp.argmax(run)  # the first of the longest
        if self.occurrence == "last":
            best = tokens.shape[0] - 1 - jnp.argmax(run[::-1])
        return best + 1, run[best] > 0
