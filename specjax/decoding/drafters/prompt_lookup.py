"""Prompt lookup (PLD, Saxena 2023): drafts the continuation of an earlier n-gram."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specjax.core.settings import SettingError, setting
from specjax.decoding.drafter import Context, CopyDrafter, Params, Proposal, State, copied_chain
from specjax.decoding.sampling import Draw
from specjax.models.target import Target


@dataclass(frozen=True)
class PromptLookup(CopyDrafter):
    """PLD: no weights, no taps; one chain of `num_tokens`.

    As published, the first occurrence of the longest n-gram wins, and only occurrences followed by
    `num_tokens` tokens count, unless `allow_shorter`. With a large `max_ngram` and the last
    occurrence this is longest suffix matching. An occurrence may overlap the n-gram that is looked
    up, which the published code rules out; this matters only if `num_tokens <= max_ngram`.
    """

    max_ngram: int = setting(3, at_least=1)
    """Longest n-gram to look up, in tokens."""
    min_ngram: int = setting(1, at_least=1)
    """Shortest n-gram to look up; no longer than max_ngram."""
    allow_shorter: bool = False
    """Draft the tokens there are if fewer than num_tokens follow; true or false."""
    occurrence: str = setting("first", choices=("first", "last"))
    """Which of several longest matches to copy from."""

    def check_settings(self) -> None:
        if self.min_ngram > self.max_ngram:
            problem = f"must be at most max_ngram, {self.max_ngram}, got {self.min_ngram}; lower it"
            raise SettingError("min_ngram", problem)

    def propose(
        self, target: Target, params: Params, state: State, context: Context, draw: Draw
    ) -> tuple[Proposal, State]:
        start, has_match = jax.vmap(self._find)(context.tokens, context.length)
        return Proposal(copied_chain(context, start, has_match, self.num_tokens)), state

    def _find(
        self, tokens: Int[Array, " S"], length: Int[Array, ""]
    ) -> tuple[Int[Array, ""], Bool[Array, ""]]:
        """Returns the start of the drafted continuation, and whether there is one."""
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
        continuation = 1 if self.allow_shorter else self.num_tokens
        is_candidate = (run >= self.min_ngram) & (ends + continuation < length)
        run = jnp.where(is_candidate, run, 0)
        best = jnp.argmax(run)  # the first of the longest
        if self.occurrence == "last":
            best = tokens.shape[0] - 1 - jnp.argmax(run[::-1])
        return best + 1, run[best] > 0
