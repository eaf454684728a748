"""Prompt lookup: what followed the same tokens earlier in the text is drafted again.

`PromptLookup` (PLD, Saxena 2023) takes the first earlier occurrence of the last n tokens.
`PromptLookupPlus` (PLD+, Somasundaram et al. 2024) looks at every earlier occurrence of the last
token and takes the one that the target's own hidden states find most alike.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.decoding.drafter import (
    Context,
    Outcome,
    Params,
    Proposal,
    State,
    refuse_params,
)
from specjax.decoding.prompt import Prompt
from specjax.decoding.sampling import Draw
from specjax.decoding.tree import DraftTree, chain
from specjax.errors import SpecjaxError
from specjax.models.cache import write_slots
from specjax.models.config import LlamaConfig
from specjax.models.outputs import ModelOutput, Taps
from specjax.pytree import pytree


@dataclass(frozen=True)
class PromptLookup:
    """PLD: no weights, no taps; one chain of `num_tokens`.

    As published, the longest n-gram wins, among its occurrences the first, and only those count
    that are followed by `num_tokens` known tokens; `allow_shorter` drafts what is there instead.
    An occurrence may overlap the n-gram that is looked up, which the published code refuses; that
    can only matter where `num_tokens <= max_ngram`.

    Raises:
        SpecjaxError: unless `1 <= min_ngram <= max_ngram` and `num_tokens >= 1`.
    """

    num_tokens: int = 10
    max_ngram: int = 3
    min_ngram: int = 1
    allow_shorter: bool = False

    num_probes = 0

    def __post_init__(self):
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise SpecjaxError(
                f"n-grams of {self.min_ngram} to {self.max_ngram} tokens make no range; use "
                "1 <= min_ngram <= max_ngram"
            )
        _check_num_tokens(self.num_tokens)

    @property
    def taps(self) -> Taps:
        return Taps()

    @property
    def num_nodes(self) -> int:
        return self.num_tokens + 1

    @property
    def max_depth(self) -> int:
        return self.num_tokens

    def check(self, config: LlamaConfig, params: Any) -> None:
        refuse_params("PromptLookup", params)

    def init(self, params: Params, prompt: Prompt, prefill: ModelOutput, num_slots: int) -> State:
        return None

    def propose(
        self, params: Params, state: State, context: Context, draw: Draw
    ) -> tuple[Proposal, State]:
        start, found = jax.vmap(self._find)(context.tokens, context.length)
        return Proposal(_continue(context, start, found, self.num_tokens)), state

    def update(self, params: Params, state: State, outcome: Outcome) -> State:
        return state

    def _find(
        self, tokens: Int[Array, " S"], length: Int[Array, ""]
    ) -> tuple[Int[Array, ""], Bool[Array, ""]]:
        """Where the drafted continuation starts, and whether there is any."""
        ends = jnp.arange(tokens.shape[0])  # last token of a candidate n-gram
        same = jnp.stack(
            [
                (jnp.roll(tokens, back) == tokens[length - 1 - back])
                & (ends >= back)
                & (back < length)
                for back in range(self.max_ngram)
            ]
        )
        run = jnp.sum(jnp.cumprod(same, axis=0), axis=0)  # tokens alike, counted back from the end
        continuation = 1 if self.allow_shorter else self.num_tokens
        is_candidate = (run >= self.min_ngram) & (ends + continuation < length)
        run = jnp.where(is_candidate, run, 0)
        best = jnp.argmax(run)  # of the longest the first
        return best + 1, run[best] > 0


@pytree
class SeenHidden:
    """State of PLD+: the target's hidden state at every committed position but the root's."""

    states: Float[Array, "B S D"]  # of unit length, so that a product is a cosine


@dataclass(frozen=True)
class PromptLookupPlus:
    """PLD+ by hidden states: candidates are all earlier occurrences of the root, of any context.

    The best is the one whose preceding token has the hidden state closest to that of the token
    before the root (equation 2; the root's own state is not known yet). `layer` is numbered as in
    `Taps`; the paper takes 9 of Vicuna-7B's 32, and up to 70 tokens. Candidates less alike than
    `min_similarity` are not drafted (appendix B.3).

    Raises:
        SpecjaxError: for fewer than 1 token or a similarity outside [-1, 1].
    """

    layer: int = 9
    num_tokens: int = 70
    min_similarity: float = -1.0

    num_probes = 0

    def __post_init__(self):
        _check_num_tokens(self.num_tokens)
        if not -1 <= self.min_similarity <= 1:
            raise SpecjaxError(
                f"min_similarity {self.min_similarity} is outside [-1, 1], the range of a cosine"
            )

    @property
    def taps(self) -> Taps:
        return Taps(hidden_layers=(self.layer,))

    @property
    def num_nodes(self) -> int:
        return self.num_tokens + 1

    @property
    def max_depth(self) -> int:
        return self.num_tokens

    def check(self, config: LlamaConfig, params: Any) -> None:
        refuse_params("PromptLookupPlus", params)

    @staticmethod
    def layer_for(config: LlamaConfig) -> int:
        """The layer as deep in this target as the paper's 9 of 32."""
        return max(1, round(config.num_hidden_layers * 9 / 32))

    def init(
        self, params: Params, prompt: Prompt, prefill: ModelOutput, num_slots: int
    ) -> SeenHidden:
        assert prefill.hidden is not None
        seen = _unit(prefill.hidden[:, :, 0])
        return SeenHidden(jnp.pad(seen, ((0, 0), (0, num_slots - seen.shape[1]), (0, 0))))

    def propose(
        self, params: Params, state: SeenHidden, context: Context, draw: Draw
    ) -> tuple[Proposal, SeenHidden]:
        start, found = jax.vmap(self._find)(state.states, context.tokens, context.length)
        return Proposal(_continue(context, start, found, self.num_tokens)), state

    def update(self, params: Params, state: SeenHidden, outcome: Outcome) -> SeenHidden:
        assert outcome.output.hidden is not None
        on_path = _unit(outcome.along_path(outcome.output.hidden[:, :, 0]))
        return SeenHidden(write_slots(state.states, on_path, outcome.root_slot, axis=1))

    def _find(
        self,
        states: Float[Array, "S D"],
        tokens: Int[Array, " T"],
        length: Int[Array, ""],
    ) -> tuple[Int[Array, ""], Bool[Array, ""]]:
        """Where the drafted continuation starts, and whether there is any."""
        before_root = states[length - 2]
        # Entry j: the cosine of the states before j and before the root.
        likeness = jnp.roll(states @ before_root, 1)[: tokens.shape[0]].astype(jnp.float32)
        at = jnp.arange(tokens.shape[0])
        is_candidate = (tokens == tokens[length - 1]) & (at >= 1) & (at < length - 1)
        likeness = jnp.where(is_candidate, likeness, -jnp.inf)
        best = jnp.argmax(likeness)
        return best + 1, likeness[best] >= self.min_similarity


def _continue(
    context: Context,
    start: Int[Array, " B"],
    found: Bool[Array, " B"],
    num_tokens: int,
) -> DraftTree:
    """A chain of the tokens from `start` on, as far as they are known; none unless `found`."""
    at = start[:, None] + jnp.arange(num_tokens)[None, :]
    drafted = jnp.take_along_axis(context.tokens, at, axis=1, mode="clip")
    count = jnp.where(found, jnp.clip(context.length - start, 0, num_tokens), 0)
    return chain(context.root, drafted, count)


def _unit(states: Float[Array, "B Q D"]) -> Float[Array, "B Q D"]:
    """Scaled to length 1; zero stays zero."""
    wide = states.astype(jnp.float32)
    norm = jnp.linalg.norm(wide, axis=-1, keepdims=True)
    return (wide / jnp.maximum(norm, 1e-12)).astype(states.dtype)


def _check_num_tokens(num_tokens: int) -> None:
    if num_tokens < 1:
        raise SpecjaxError(f"num_tokens {num_tokens} must be at least 1: nothing would be drafted")
