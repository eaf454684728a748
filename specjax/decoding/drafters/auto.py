"""`auto`: a gate that runs another drafter only while drafting pays.

The break-even is the number of accepted tokens per round that makes up for its cost beyond a step
of plain decoding; `specjax tune machine` measures it. The gate keeps an exponential mean of
accepted tokens, and a budget: the steps gained on plain decoding so far, plus a small credit. It is
open while the mean exceeds the break-even (for a chain without params) and the budget is not
negative, so a text never falls behind plain decoding by more than the credit, the allowance and one
draft.

A drafter without params that drafts chains, such as prompt lookup, costs almost nothing. A draft
that is withheld becomes a *shadow*: it is compared with the tokens of plain decoding and counts as
if it had been drafted, so the gate reopens when the text becomes predictable. While closed, it
drafts with exponential backoff.

Any other drafter, with params or drafting trees, costs the same whether or not its draft is used,
and cannot catch up with tokens that it has not seen. Once the budget is spent, it stops for the
rest of the text, or until half of the texts in the batch are new.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.core.errors import SpecjaxError
from specjax.core.pytree import pytree
from specjax.decoding.drafter import Context, Drafter, Outcome, Params, Proposal, Start, State
from specjax.decoding.sampling import Draw
from specjax.decoding.tree import DraftTree, root_only
from specjax.decoding.widths import if_in_place
from specjax.models.target import Taps, Target

# Chosen by replaying prompt lookup and heads over predictable, random and misleading texts.
KEPT = 0.7  # weight of earlier drafts in the mean, at each new one
CREDIT = 2.0  # steps that a text may lose before it gains any; also the initial mean
ALLOWANCE = 0.01  # further steps that it may lose, per round
MAX_PAUSE = 7  # maximum backoff, in rounds, while the gate is closed


@pytree
class GateState:
    """The state of a gate over B sequences. D = N - 1, the longest shadow."""

    inner: State
    mean: Float[Array, " B"]  # accepted tokens per draft
    budget: Float[Array, " B"]  # steps; closed while their mean is negative
    shadow: Int[Array, "B D"]  # drafted, but withheld
    shadow_length: Int[Array, " B"]  # 0 without a shadow
    num_right: Int[Array, " B"]  # tokens of the shadow that the target generated since
    wait: Int[Array, " B"]  # rounds until the next draft of a closed gate
    pause: Int[Array, " B"]  # current backoff, in rounds
    is_finished: Bool[Array, " B"]  # nothing was committed last time, and nothing will be


@dataclass(frozen=True)
class Auto(Drafter):
    """Drafts with another method while that pays.

    A narrow pass for rounds without a draft is compiled as well where padding would cost time. A
    batch shares its pass, so the gate decides for all sequences at once, by the mean over those
    that are not done. One that begins later brings the credit of a new text.

    The decision does not depend on the drafted tokens, so `coupled` verification still generates
    the tokens of plain decoding, and `rejection` their distribution. But under `rejection` and
    `typical` a sequence may depend on the others of its batch, and on the break-even.
    """

    inner: Drafter  # without a probe, which would run in every pass
    break_even: float  # in tokens, measured with batch size 1; below 0 the gate never closes

    @property
    def pass_widths(self) -> tuple[int, ...] | None:
        widths = self.inner.pass_widths
        return None if widths is None else (1, *(width for width in widths if width > 1))

    @property
    def num_nodes(self) -> int:
        return self.inner.num_nodes

    @property
    def max_depth(self) -> int:
        return self.inner.max_depth

    @property
    def taps(self) -> Taps:
        return self.inner.taps

    def check(self, target: Target, params: Any) -> None:
        if self.inner.num_probes or self.num_nodes < 2 or isinstance(self.inner, Auto):
            raise SpecjaxError(
                f"{type(self.inner).__name__} cannot be gated: it drafts nothing, has a probe "
                "or is a gate; use it alone"
            )
        self.inner.check(target, params)

    def init(self, start: Start) -> GateState:
        if start.is_part:
            raise SpecjaxError("Auto cannot be part of a hybrid; put the whole hybrid into Auto")
        zeros = jnp.zeros_like(start.prompt.length)
        return GateState(
            inner=self.inner.init(start),
            mean=jnp.full(zeros.shape, CREDIT),
            budget=jnp.full(zeros.shape, CREDIT, jnp.float32),  # a weak type compiles `run` twice
            shadow=jnp.zeros((*zeros.shape, self.num_nodes - 1), jnp.int32),
            shadow_length=zeros,
            num_right=zeros,
            wait=zeros,
            pause=zeros,
            is_finished=zeros > 0,
        )

    def propose(
        self, target: Target, params: Params, state: GateState, context: Context, draw: Draw
    ) -> tuple[Proposal, GateState]:
        def draft(context: Context, carry: tuple[Any, State]) -> tuple[DraftTree, State]:
            (tree, _), inner = self.inner.propose(target, params, carry[1], context, draw)
            return tree, inner

        def pays(has_draft: Bool[Array, " B"]) -> Bool[Array, ""]:
            expected = jnp.maximum(state.mean, state.num_right)
            mean = _mean(jnp.where(has_draft, expected, 0), is_active)
            return (mean > self.break_even) & has_budget

        is_active, has_shadow = ~state.is_finished, state.shadow_length > 0
        has_budget = _has_budget(state)
        shape, _ = jax.eval_shape(draft, context, (None, state.inner))
        empty = root_only(shape, context.root)
        drafts_now = has_budget
        if has_shadows := _has_shadows(params, shape):
            drafts_now = pays(is_active) | jnp.any(is_active & ~has_shadow & (state.wait <= 0))
        tree, inner = if_in_place(drafts_now, draft, context, (empty, state.inner))
        if not has_shadows:
            return Proposal(tree), replace(state, inner=inner)
        num_drafted = tree.num_valid() - 1
        is_open = pays(num_drafted > 0)
        is_new = ~is_open & ~has_shadow
        state = replace(
            state,
            inner=inner,
            shadow=jnp.where(is_new[:, None], tree.tokens[:, 1:], state.shadow),
            shadow_length=jnp.where(is_new, num_drafted, state.shadow_length),
        )
        return Proposal(replace(tree, valid=jnp.where(is_open, tree.valid, empty.valid))), state

    def update(
        self, target: Target, params: Params, state: GateState, outcome: Outcome
    ) -> GateState:
        def learn(outcome: Outcome, inner: State) -> State:
            return self.inner.update(target, params, inner, outcome)

        is_active, drafted = outcome.num_committed > 0, outcome.tree.num_valid() > 1
        gain = outcome.verification.num_accepted - self.break_even
        if _has_shadows(params, outcome.tree):
            gain = jnp.where(jnp.any(drafted), gain, 0) + ALLOWANCE
            inner = learn(outcome, state.inner)
            state = _observe(state, outcome, drafted, is_active)
        else:  # finding nothing to draft costs time as well
            is_open = _has_budget(state)
            inner = if_in_place(is_open, learn, outcome, state.inner)
            spent = jnp.minimum(
                state.budget, -CREDIT
            )  # only the credit of new texts opens it again
            gain = jnp.where(is_open, gain, spent - state.budget)
        return replace(state, inner=inner, budget=state.budget + gain, is_finished=~is_active)


def _observe(
    state: GateState, outcome: Outcome, drafted: Bool[Array, " B"], is_active: Bool[Array, " B"]
) -> GateState:
    """Updates the mean and the backoff from drafts, decided shadows and empty drafts."""
    expected = jnp.take_along_axis(state.shadow, state.num_right[:, None], axis=1, mode="clip")
    is_compared = is_active & ~drafted & (state.shadow_length > 0)
    is_right = is_compared & (outcome.context.root == expected[:, 0])
    num_right = state.num_right + is_right
    is_decided = is_compared & (~is_right | (num_right == state.shadow_length))
    is_observed = drafted | is_decided | ((state.shadow_length == 0) & (state.wait <= 0))
    tokens = jnp.where(drafted, outcome.verification.num_accepted, num_right)
    is_unsuccessful = is_observed & (tokens == 0)
    pause = jnp.where(tokens > 0, 0, state.pause)
    pause = jnp.where(is_unsuccessful, jnp.minimum(2 * pause + 1, MAX_PAUSE), pause)
    return replace(
        state,
        mean=jnp.where(is_observed, KEPT * state.mean + (1 - KEPT) * tokens, state.mean),
        shadow_length=jnp.where(is_observed, 0, state.shadow_length),
        num_right=jnp.where(is_observed, 0, num_right),
        wait=jnp.where(is_unsuccessful, pause, state.wait - 1),
        pause=pause,
    )


def _has_budget(state: GateState) -> Bool[Array, ""]:
    budget = jnp.maximum(state.budget, -CREDIT)  # more, and no new text could open the gate
    return _mean(budget, ~state.is_finished) >= 0


def _mean(values: Array, mask: Bool[Array, " B"]) -> Float[Array, ""]:
    return jnp.sum(jnp.where(mask, values, 0)) / jnp.maximum(jnp.sum(mask), 1)


def _has_shadows(params: Params, tree: DraftTree) -> bool:
    """Whether drafts are cheap and are chosen chains, which can be compared with a text."""
    return params.drafter is None and tree.is_chain and tree.draft_probs is None
