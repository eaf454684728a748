"""The state that the loop carries from round to round, and the result it returns."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.core.errors import SpecjaxError
from specjax.core.pytree import pytree
from specjax.models.cache import KVCache

NO_SOURCE = -1


@pytree
class Stats:
    """Counts over the rounds of each row. L = max_depth + 2."""

    rounds: Int[Array, " B"]  # target passes, prefill not counted
    drafted: Int[Array, " B"]  # valid nodes offered, roots not counted
    accepted: Int[Array, " B"]  # drafted tokens on the paths, those cut off the text too
    accepted_lengths: Int[
        Array, "B L"
    ]  # histogram: entry n counts the rounds that committed n tokens

    @property
    def mean_accepted_length(self) -> jax.Array:
        """Committed tokens per target pass, bonus included, over all rows."""
        lengths = jnp.arange(self.accepted_lengths.shape[1])
        rounds = jnp.maximum(jnp.sum(self.rounds), 1)
        return jnp.sum(self.accepted_lengths * lengths[None, :]) / rounds


@pytree
class Generation:
    """New tokens of each row. M = max_new_tokens."""

    tokens: Int[Array, "B M"]  # zero beyond length
    length: Int[Array, " B"]  # EOS included
    from_draft: Bool[Array, "B M"]  # the token was drafted and accepted, not added by the target
    # Position in the text (prompt, then new tokens) that it was copied from, or NO_SOURCE. A bonus
    # token gets a source in the next round, if the continuation of that source is accepted.
    source: Int[Array, "B M"]
    stats: Stats
    is_finite: Bool[Array, " B"]  # False: the row ended early, because logits were NaN or infinite

    def check(self) -> None:
        """Waits for the result and checks that every logit was finite.

        Raises:
            SpecjaxError: if a row ended early because its logits were NaN or infinite.
        """
        for row in np.flatnonzero(~np.asarray(self.is_finite)):
            raise SpecjaxError(
                f"row {row}: the target's logits are NaN or infinite after {self.length[row]} new "
                "tokens; use dtype bfloat16 or float32, or check the weights"
            )


@pytree
class LoopState:
    """The carry of the loop: everything that a round takes and returns."""

    tokens: Int[Array, "B S"]  # prompt and new tokens; meaningless beyond length
    from_draft: Bool[Array, "B S"]
    source: Int[Array, "B S"]
    length: Int[Array, " B"]  # committed tokens, root included
    prompt_length: Int[Array, " B"]
    is_finite: Bool[Array, " B"]  # False: logits were not, and the row is done
    is_done: Bool[Array, " B"]  # such rows no longer change
    sequence_keys: Key[Array, " B"]
    cache: KVCache  # length - 1 committed rows
    drafter: Any
    stats: Stats
    min_width: Int[Array, ""]  # of the next pass, in nodes: 1, or more to load a wider pass's code
    # The tapped hidden states of the text without its root, in a conversation: see `Engine.resume`.
    hidden: Float[Array, "B S T D"] | None = None

    def generation(self, max_new_tokens: int) -> Generation:
        """Returns the new tokens so far."""
        length = self.length - self.prompt_length
        at = self.prompt_length[:, None] + jnp.arange(max_new_tokens)[None, :]
        is_new = jnp.arange(max_new_tokens)[None, :] < length[:, None]
        return Generation(
            tokens=jnp.where(is_new, jnp.take_along_axis(self.tokens, at, axis=1), 0),
            length=length,
            from_draft=is_new & jnp.take_along_axis(self.from_draft, at, axis=1),
            source=jnp.where(is_new, jnp.take_along_axis(self.source, at, axis=1), NO_SOURCE),
            stats=self.stats,
            is_finite=self.is_finite,
        )
