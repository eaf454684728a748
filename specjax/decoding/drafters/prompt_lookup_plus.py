"""PLD+ (Somasundaram et al. 2024): prompt lookup that ranks occurrences by the target's states.

Candidates are all earlier occurrences of the root (equation 1). `PromptLookupPlus` compares the
target's hidden states before each candidate with those before the root (equation 3);
`PromptLookupPlusAttention` takes the candidate that the target's heads attend to most (equation 2).
The continuation of the best candidate is drafted. Neither needs training or another target pass.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.core.errors import SpecjaxError
from specjax.core.pytree import pytree
from specjax.core.settings import setting
from specjax.decoding.drafter import (
    Context,
    CopyingDrafter,
    Outcome,
    Params,
    Proposal,
    Start,
    State,
)
from specjax.decoding.sampling import Draw
from specjax.models.cache import read_slots, resized, write_slots
from specjax.models.config import TransformerConfig
from specjax.models.target import Taps, Target

Heads = tuple[tuple[int, int], ...]  # (layer, head), both from 0


@dataclass(frozen=True)
class RankedLookup(CopyingDrafter):
    """Copies a chain from the best candidate; subclasses score the candidates.

    `num_tokens` is the paper's K. Candidates are in the whole text, as in equation 1; the paper's
    prose mentions only the input.
    """

    num_tokens: int = 70

    def propose(
        self, target: Target, params: Params, state: State, context: Context, draw: Draw
    ) -> tuple[Proposal, State]:
        scores, min_score = self._scores(state, context)
        at = jnp.arange(context.tokens.shape[1])[None, :]
        end = context.length[:, None] - 1
        is_candidate = (context.tokens == context.root[:, None]) & (at >= 1) & (at < end)
        scores = jnp.where(is_candidate, scores, -jnp.inf)
        best = jnp.argmax(scores, axis=1)  # ties go to the first
        has_match = jnp.max(scores, axis=1) >= min_score
        return Proposal(self.copied(context, best + 1, has_match)), state

    @abstractmethod
    def _scores(self, state: State, context: Context) -> tuple[Float[Array, "B T"], float]:
        """Returns the score of each position as a candidate, and the minimum score."""


@pytree
class SeenHidden:
    """The target's hidden states at the committed positions before the root. D: width.

    With a prefix length m > 1 they are means over m positions; the next means need `recent`.
    """

    states: Float[Array, "B S D"]  # of unit length, so that a product is a cosine
    recent: Float[Array, "B R D"]  # the last R = m - 1 states before the root


@dataclass(frozen=True)
class PromptLookupPlus(RankedLookup):
    """PLD+ (h): ranks candidates by the cosine between the hidden states before them and the root.

    `layer` is numbered as in `Taps`; the paper takes 9 of Vicuna-7B's 32, and up to 70 tokens.
    `prefix_length` m compares means over the last m states (appendix B.2); candidates below
    `min_similarity` are not drafted (appendix B.3).
    """

    layer: int = 9
    """Layer whose hidden states are compared, from 0, the embedding, to the number of layers."""
    prefix_length: int = setting(1, at_least=1)
    """Hidden states to average before they are compared."""
    min_similarity: float = setting(-1.0, at_least=-1, at_most=1)
    """Cosine below which nothing is drafted."""

    @property
    def taps(self) -> Taps:
        return Taps(hidden_layers=(self.layer,), logits=False)

    @staticmethod
    def layer_for(config: TransformerConfig) -> int:
        """Returns the paper's layer 9, or with fewer than 32 layers the one as deep as 9 of 32.

        In deeper models the paper still finds layers 9 to 13 best.
        """
        return max(1, min(9, round(config.num_hidden_layers * 9 / 32)))

    def init(self, start: Start) -> SeenHidden:
        hidden = start.prefill.hidden
        assert hidden is not None
        back = self.prefix_length - 1
        hidden = jnp.pad(hidden[:, :, 0], ((0, 0), (back, 0), (0, 0)))
        states = resized(self._means(hidden), start.num_slots, axis=1)
        return SeenHidden(states, read_slots(hidden, start.prompt.length - 1, back, axis=1))

    def update(
        self, target: Target, params: Params, state: SeenHidden, outcome: Outcome
    ) -> SeenHidden:
        assert outcome.output.hidden is not None
        on_path = outcome.along_path(outcome.output.hidden[:, :, 0])
        hidden = jnp.concatenate([state.recent, on_path], axis=1)
        num_on_path = outcome.verification.num_accepted + 1
        return SeenHidden(
            states=write_slots(state.states, self._means(hidden), outcome.root_slot, axis=1),
            recent=read_slots(hidden, num_on_path, self.prefix_length - 1, axis=1),
        )

    def _scores(self, state: SeenHidden, context: Context) -> tuple[Float[Array, "B T"], float]:
        before_root = read_slots(state.states, context.length - 2, 1, axis=1)[:, 0]
        similarity = jnp.einsum(
            "bsd,bd->bs", state.states, before_root, preferred_element_type=jnp.float32
        )
        similarity = jnp.roll(similarity, 1, axis=1)  # entry j: before j and before the root
        return similarity[:, : context.tokens.shape[1]], self.min_similarity

    def _means(self, hidden: Float[Array, "B H D"]) -> Float[Array, "B Q D"]:
        """Returns means over `prefix_length` positions, scaled to length 1; zero stays zero."""
        count = hidden.shape[1] - self.prefix_length + 1
        wide = hidden.astype(jnp.float32)
        sums = sum(wide[:, back : back + count] for back in range(self.prefix_length))
        norm = jnp.linalg.norm(sums, axis=-1, keepdims=True)
        return (sums / jnp.maximum(norm, 1e-12)).astype(hidden.dtype)


# From the token before the root to each position; zeros before round one.
SeenAttention = Float[Array, "B S"]


@dataclass(frozen=True)
class PromptLookupPlusAttention(RankedLookup):
    """PLD+ (a): takes the candidate that the token before the root attends to most.

    `heads` are (layer, head) pairs; the paper takes Vicuna-7B's 50 best induction heads, and
    `specjax tune induction-heads` finds those of a target. `aggregate` combines them by max
    (equation 2) or sum (section 7.1). Prefill returns no attention, so the first draft copies
    from the first occurrence.
    """

    heads: Heads = ()
    """Attention heads that rank candidates, as pairs ((layer, head), ...), both from 0."""
    aggregate: str = setting("max", choices=("max", "sum"))
    """The way to combine their attention."""

    def check(self, target: Target, params: Any) -> None:
        super().check(target, params)
        if not self.heads:
            raise SpecjaxError("no heads are chosen; give heads as ((layer, head), ...)")

    @property
    def taps(self) -> Taps:
        return Taps(attention_heads=self.heads, logits=False)

    @staticmethod
    def heads_for(config: TransformerConfig, layer: int | None = None) -> Heads:
        """Returns all heads of one layer, by default the middle one.

        A fallback until `specjax tune induction-heads` has found those of the target.
        """
        layer = config.num_hidden_layers // 2 if layer is None else layer
        return tuple((layer, head) for head in range(config.num_attention_heads))

    def init(self, start: Start) -> SeenAttention:
        return jnp.zeros((len(start.prompt.length), start.num_slots))

    def update(
        self, target: Target, params: Params, state: SeenAttention, outcome: Outcome
    ) -> SeenAttention:
        combine = {"max": jnp.max, "sum": jnp.sum}[self.aggregate]
        return combine(outcome.last_attention(), axis=1)

    def _scores(self, state: SeenAttention, context: Context) -> tuple[Float[Array, "B T"], float]:
        return state[:, : context.tokens.shape[1]], 0.0
