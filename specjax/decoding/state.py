"""The state of the loop, and its result."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.core.compilation import with_default_types
from specjax.core.errors import SpecjaxError
from specjax.core.pytree import pytree
from specjax.decoding.sampling import SamplingValues
from specjax.decoding.tree import LogProbs
from specjax.models.cache import KVCache

NO_SOURCE = -1


@pytree
class Stats:
    """Counts over the rounds of each sequence. L = max_depth + 2."""

    rounds: Int[Array, " B"]  # target passes, prefill not counted
    drafted: Int[Array, " B"]  # valid nodes offered, roots not counted
    accepted: Int[Array, " B"]  # drafted tokens on the paths, also those cut off at the end
    # Histogram: entry n counts the rounds that committed n tokens.
    accepted_lengths: Int[Array, "B L"]

    @property
    @with_default_types
    def mean_accepted_length(self) -> jax.Array:
        """Committed tokens per target pass, bonus included, over all sequences."""
        lengths = jnp.arange(self.accepted_lengths.shape[1])
        rounds = jnp.maximum(jnp.sum(self.rounds), 1)
        return jnp.sum(self.accepted_lengths * lengths[None, :]) / rounds


@pytree
class Generation:
    """New tokens of each sequence. M = max_new_tokens."""

    tokens: Int[Array, "B M"]  # zero beyond length
    length: Int[Array, " B"]  # EOS included
    from_draft: Bool[Array, "B M"]  # the token was drafted and accepted, not added by the target
    # Position (in the prompt and new tokens) that each token was copied from, or NO_SOURCE. A bonus
    # token gets its source in the next round, if the continuation of that source is accepted.
    source: Int[Array, "B M"]
    stats: Stats
    is_finite: Bool[Array, " B"]  # False: it ended early, at NaN or infinite logits
    logprobs: LogProbs | None = None  # zero beyond length; None: not recorded

    def check(self) -> None:
        """Waits for the result and checks that every logit was finite."""
        for sequence in np.flatnonzero(~np.asarray(self.is_finite)):
            raise SpecjaxError(
                f"sequence {sequence}: the target's logits are NaN or infinite, or processors "
                f"banned all tokens, after {self.length[sequence]} new tokens; use dtype bfloat16 "
                "or float32, or check weights and processors"
            )


@pytree
class Prefix:
    """The part of a `LoopState` that `Engine.resume` reads."""

    tokens: Int[Array, "B P"]
    length: Int[Array, " B"]
    cache: KVCache
    hidden: Float[Array, "B H T D"] | None = None


@pytree
class LoopState:
    """The carry of the loop: everything that a round takes and returns."""

    tokens: Int[Array, "B S"]  # prompt and new tokens; meaningless beyond length
    from_draft: Bool[Array, "B S"]
    source: Int[Array, "B S"]
    length: Int[Array, " B"]  # committed tokens, root included
    prompt_length: Int[Array, " B"]
    is_finite: Bool[Array, " B"]  # False: logits were not, and the sequence is done
    is_done: Bool[Array, " B"]  # such sequences no longer change
    sequence_keys: Key[Array, " B"]
    cache: KVCache  # length - 1 committed tokens
    drafter: Any
    stats: Stats
    min_width: Int[Array, ""]  # nodes of the next pass, at least; above 1 only in a warm-up
    # Tapped hidden states without the root's, in a conversation: see `Engine.resume`.
    hidden: Float[Array, "B S T D"] | None = None
    processors: tuple[Any, ...] = ()  # their states after the committed tokens
    logprobs: LogProbs | None = None  # entry s: of the token at position s of the text
    sampling: SamplingValues | None = None  # None: all sequences share the settings

    def generation(self, max_new_tokens: int) -> Generation:
        """Returns the new tokens so far."""
        length = self.length - self.prompt_length
        at = self.prompt_length[:, None] + jnp.arange(max_new_tokens)[None, :]
        is_new = jnp.arange(max_new_tokens)[None, :] < length[:, None]

        def new(values: Array) -> Array:  # [B, S, ...]
            values = jax.vmap(lambda entries, place: entries[place])(values, at)
            return jnp.where(is_new.reshape(*is_new.shape, *[1] * (values.ndim - 2)), values, 0)

        return Generation(
            tokens=jnp.where(is_new, jnp.take_along_axis(self.tokens, at, axis=1), 0),
            length=length,
            from_draft=is_new & jnp.take_along_axis(self.from_draft, at, axis=1),
            source=jnp.where(is_new, jnp.take_along_axis(self.source, at, axis=1), NO_SOURCE),
            stats=self.stats,
            is_finite=self.is_finite,
            logprobs=jax.tree.map(new, self.logprobs),
        )
