"""`auto`: another drafter behind a gate that lets it draft only while that pays.

The break-even is how many drafted tokens a round must have accepted to make up for what it costs
beyond a step of plain decoding; `specjax tune machine` measures it. The gate keeps an exponential
mean of accepted tokens, and a budget: the steps that the text is ahead of plain decoding, plus a
little credit. Drafts pass while the mean exceeds the break-even and the budget is not spent. So a
text never falls behind plain decoding by more than the credit, the allowance and one draft.

A drafter without params that drafts chains, such as prompt lookup, is almost free to ask. A draft
that is withheld becomes a *shadow*: it is compared with what plain decoding says next, and counts
as if it had been drafted, so the gate opens again when the text becomes predictable. While shut, it
pauses after each unsuccessful look, with exponential backoff.

A drafter with params costs as much to ask as to use, and cannot catch up with text that it has not
seen. Once the budget is spent, it is shut for the rest of that text (or batch).
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
CREDIT = 2.0  # steps that a text may lose before it gains any; also the mean that it starts with
ALLOWANCE = 0.01  # further steps that it may lose, per round
LONGEST_PAUSE = 7  # rounds between two looks of a shut gate


@pytree
class GateState:
    """The state of a gate over B texts. D = N - 1, the longest shadow."""

    inner: State
    mean: Float[Array, " B"]  # accepted tokens per draft
    budget: Float[Array, ""]  # steps; nothing passes while it is negative
    shadow: Int[Array, "B D"]  # drafted, but withheld
    shadow_length: Int[Array, " B"]  # 0: there is none
    num_true: Int[Array, " B"]  # tokens of the shadow that the target has said since
    wait: Int[Array, " B"]  # rounds until the next look
    pause: Int[Array, " B"]  # the wait after the last look in vain
    is_finished: Bool[Array, " B"]  # nothing was committed last time, and nothing will be


@dataclass(frozen=True)
class Auto(Drafter):
    """Drafts with another method, as long as that pays: a gate withholds drafts that will not.

    Two passes are compiled, over the root alone and over all nodes.

    A batch shares its pass, so the gate decides for all rows at once, by the mean over those that
    are not done.

    Drafts are withheld by what was known before their tokens were drawn, so under `coupled`
    verification the text stays that of plain decoding, and under `rejection` its distribution. But
    there, and under `typical`, which tokens are drawn depends on what is drafted: so the text of a
    row may depend on the others of its batch, and on the break-even.
    """

    inner: Drafter  # without probe rows, which would run in every pass
    break_even: float  # in tokens, measured with one text at a time; below 0: the gate never shuts

    pass_widths = (1,)

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
                f"{type(self.inner).__name__} cannot be gated: it drafts nothing, has probe rows "
                "or is a gate; use it alone"
            )
        self.inner.check(target, params)

    def init(self, start: Start) -> GateState:
        none = jnp.zeros_like(start.prompt.length)
        return GateState(
            inner=self.inner.init(start),
            mean=jnp.full(none.shape, CREDIT),
            budget=jnp.asarray(CREDIT, jnp.float32),  # a weak type would compile `run` twice
            shadow=jnp.zeros((*none.shape, self.num_nodes - 1), jnp.int32),
            shadow_length=none,
            num_true=none,
            wait=none,
            pause=none,
            is_finished=none > 0,
        )

    def propose(
        self, target: Target, params: Params, state: GateState, context: Context, draw: Draw
    ) -> tuple[Proposal, GateState]:
        def ask(context: Context, carry: tuple[Any, State]) -> tuple[DraftTree, State]:
            (tree, _), inner = self.inner.propose(target, params, carry[1], context, draw)
            return tree, inner

        def pays(drafts: Bool[Array, " B"]) -> Bool[Array, ""]:
            expected = jnp.maximum(state.mean, state.num_true)  # a true shadow is evidence, too
            mean = _mean(jnp.where(drafts, expected, 0), is_active)
            return (mean > self.break_even) & (state.budget >= 0)

        is_active, has_shadow = ~state.is_finished, state.shadow_length > 0
        shape, _ = jax.eval_shape(ask, context, (None, state.inner))
        nothing = root_only(shape, context.root)
        looks = state.budget >= 0
        if has_shadows := _has_shadows(params, shape):
            looks = pays(is_active) | jnp.any(is_active & ~has_shadow & (state.wait <= 0))
        tree, inner = if_in_place(looks, ask, context, (nothing, state.inner))
        if not has_shadows:
            return Proposal(tree), replace(state, inner=inner)
        num_drafted = tree.num_valid() - 1
        passes = pays(num_drafted > 0)
        is_new = ~passes & ~has_shadow
        state = replace(
            state,
            inner=inner,
            shadow=jnp.where(is_new[:, None], tree.tokens[:, 1:], state.shadow),
            shadow_length=jnp.where(is_new, num_drafted, state.shadow_length),
        )
        return Proposal(replace(tree, valid=jnp.where(passes, tree.valid, nothing.valid))), state

    def update(
        self, target: Target, params: Params, state: GateState, outcome: Outcome
    ) -> GateState:
        def learn(outcome: Outcome, inner: State) -> State:
            return self.inner.update(target, params, inner, outcome)

        is_active, drafted = outcome.num_committed > 0, outcome.tree.num_valid() > 1
        gain = _mean(outcome.verification.num_accepted, is_active) - self.break_even
        if _has_shadows(params, outcome.tree):
            gain = jnp.where(jnp.any(drafted), gain, 0) + ALLOWANCE
            inner = learn(outcome, state.inner)
            state = _observe(state, outcome, drafted, is_active)
        else:  # every round costs, also one that drafted nothing
            inner = if_in_place(state.budget >= 0, learn, outcome, state.inner)
        return replace(state, inner=inner, budget=state.budget + gain, is_finished=~is_active)


def _observe(
    state: GateState, outcome: Outcome, drafted: Bool[Array, " B"], is_active: Bool[Array, " B"]
) -> GateState:
    """Observes drafts that passed, shadows that are decided, and looks that found nothing."""
    wanted = jnp.take_along_axis(state.shadow, state.num_true[:, None], axis=1, mode="clip")[:, 0]
    is_compared = is_active & ~drafted & (state.shadow_length > 0)
    is_true = is_compared & (outcome.context.root == wanted)
    num_true = state.num_true + is_true
    is_decided = is_compared & (~is_true | (num_true == state.shadow_length))
    is_observed = drafted | is_decided | ((state.shadow_length == 0) & (state.wait <= 0))
    tokens = jnp.where(drafted, outcome.verification.num_accepted, num_true)
    is_in_vain = is_observed & (tokens == 0)
    pause = jnp.where(tokens > 0, 0, state.pause)
    pause = jnp.where(is_in_vain, jnp.minimum(2 * pause + 1, LONGEST_PAUSE), pause)
    return replace(
        state,
        mean=jnp.where(is_observed, KEPT * state.mean + (1 - KEPT) * tokens, state.mean),
        shadow_length=jnp.where(is_observed, 0, state.shadow_length),
        num_true=jnp.where(is_observed, 0, num_true),
        wait=jnp.where(is_in_vain, pause, state.wait - 1),
        pause=pause,
    )


def _mean(values: Array, counts: Bool[Array, " B"]) -> Float[Array, ""]:
    return jnp.sum(jnp.where(counts, values, 0)) / jnp.maximum(jnp.sum(counts), 1)


def _has_shadows(params: Params, tree: DraftTree) -> bool:
    """Whether drafts cost little and are chosen chains, which can be compared with a text."""
    return params.drafter is None and tree.is_chain and tree.draft_probs is None
