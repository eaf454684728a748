"""What a gate carries from round to round: what it saw of drafts, its shadows, and its losses."""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.core.pytree import pytree
from specjax.decoding.drafter import Outcome, State

# Chosen with those of `auto`.
KEPT = 0.8  # of the weight of earlier observations, at each new one
PRIOR_WEIGHT = 0.5  # of what tuning saw, in observations
LONGEST_PAUSE = 7  # rounds between two looks of a shut gate


@pytree
class GateState:
    """Of B texts. D = N - 1, the longest shadow."""

    inner: State
    accepted: Float[Array, " B"]  # tokens of the observed drafts, older ones counting less
    observed: Float[Array, " B"]  # those drafts
    shadow: Int[Array, "B D"]  # drafted, but not let through
    shadow_length: Int[Array, " B"]  # 0: there is none
    num_true: Int[Array, " B"]  # tokens of the shadow that the target has said since
    wait: Int[Array, ""]  # rounds until a shut gate looks again
    pause: Int[Array, ""]  # and how long it waits after that
    is_proven: Bool[Array, " B"]  # a drafted or shadowed token has come true in this text
    debt: Float[Array, ""]  # steps lost to plain decoding; below 0: gained
    is_finished: Bool[Array, " B"]  # nothing was committed last time, and nothing will be
    is_open: Bool[Array, ""]  # of a gate without shadows; once shut it stays so

    @property
    def num_active(self) -> Float[Array, ""]:
        """Texts that go on, 1 at least."""
        return jnp.maximum(jnp.sum(~self.is_finished, dtype=jnp.float32), 1)

    @property
    def longer_pause(self) -> Int[Array, ""]:
        """After a look that found nothing, or nothing true."""
        return jnp.minimum(2 * self.pause + 1, LONGEST_PAUSE)

    @property
    def expected(self) -> Float[Array, " B"]:
        """Tokens that the next draft of each row is expected to have accepted."""
        so_far = KEPT * self.accepted + 2 * self.num_true
        with_shadow = so_far / (KEPT * self.observed + 1)
        with_shadow = jnp.where(self.shadow_length > 0, with_shadow, 0)
        return jnp.maximum(self.accepted / self.observed, with_shadow)


def first_state(inner: State, batch: int, longest_shadow: int, expected: float) -> GateState:
    """Before the first round of `batch` texts: `expected` is what tuning saw accepted."""
    none = jnp.zeros((batch,), jnp.int32)
    return GateState(
        inner=inner,
        accepted=jnp.full((batch,), PRIOR_WEIGHT * expected, jnp.float32),
        observed=jnp.full((batch,), PRIOR_WEIGHT, jnp.float32),
        shadow=jnp.zeros((batch, longest_shadow), jnp.int32),
        shadow_length=none,
        num_true=none,
        wait=jnp.zeros((), jnp.int32),
        pause=jnp.zeros((), jnp.int32),
        is_proven=jnp.zeros((batch,), bool),
        debt=jnp.zeros((), jnp.float32),
        is_finished=jnp.zeros((batch,), bool),
        is_open=jnp.ones((), bool),
    )


def observe(state: GateState, outcome: Outcome, has_committed: Bool[Array, " B"]) -> GateState:
    """Counts what was drafted, and shadows that are decided or overtaken by a draft.

    A row that drafts nothing commits one token.
    """
    drafted = outcome.tree.num_valid() > 1
    at = jnp.minimum(state.num_true, state.shadow.shape[1] - 1)[:, None]
    next_token = jnp.take_along_axis(state.shadow, at, axis=1)[:, 0]
    is_compared = (state.shadow_length > 0) & ~drafted & has_committed
    is_true = is_compared & (outcome.context.root == next_token)
    num_true = state.num_true + is_true
    ends = (state.shadow_length > 0) & (drafted | (is_compared & ~is_true))
    ends = ends | (is_true & (num_true == state.shadow_length))
    accepted, observed = state.accepted, state.observed
    for counts, tokens in ((ends, num_true), (drafted, outcome.verification.num_accepted)):
        accepted = jnp.where(counts, KEPT * accepted + tokens, accepted)
        observed = jnp.where(counts, KEPT * observed + 1, observed)
    came_true = is_true | (drafted & (outcome.verification.num_accepted > 0))
    is_promising = jnp.any(came_true)
    is_useless = jnp.any(ends & (num_true == 0))
    pause = jnp.where(is_useless, state.longer_pause, state.pause)
    pause = jnp.where(is_promising, 0, pause)
    return replace(
        state,
        accepted=accepted,
        observed=observed,
        shadow_length=jnp.where(ends, 0, state.shadow_length),
        num_true=jnp.where(ends, 0, num_true),
        is_proven=state.is_proven | came_true,
        pause=pause,
        wait=jnp.where(is_promising | is_useless, pause, state.wait),
    )
