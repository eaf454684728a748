"""`auto`: another drafter behind a gate that lets it draft only while that pays on this machine.

A round that drafts costs more than plain decoding's one step, by how much `specjax tune machine`
measures. So the gate asks what it will gain: how many drafted tokens were accepted of late.

*Shadows.* A lookup drafts for almost nothing, so its gate looks at drafts even while it is shut.
One that it does not let through becomes a shadow: it is compared with what plain decoding says in
the rounds that follow, for free, and counts as if it had been drafted. So the gate opens when the
text turns predictable, without paying for trials; where these are dear, the first draft of a text
is a shadow, too. After looks in vain it pauses before the next one.

*Without shadows.* A drafter with weights or a datastore costs as much to look at as to use, and
cannot catch up with what it has not seen. A shut gate does not ask it at all, and stays shut for
the rest of that text (that batch of texts); so it shuts only after a real loss. Rounds in which it
is asked and drafts nothing count as losses, too.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.core.errors import SpecjaxError
from specjax.decoding.drafter import Context, Drafter, Outcome, Params, Proposal, State
from specjax.decoding.drafters.gate_state import GateState, first_state, observe
from specjax.decoding.prompt import Prompt
from specjax.decoding.sampling import Draw
from specjax.decoding.tree import NO_PARENT, DraftTree
from specjax.decoding.widths import if_in_place
from specjax.models.pass_costs import RowCosts, are_costs
from specjax.models.target import ModelOutput, Taps, Target

# Chosen by replaying prompt lookup over pocket's texts and random ones, for rounds of 1.1 to 3
# steps: within 1.5% of plain decoding where it cannot help, else mostly as fast as without a gate.
CAUTION = 0.25  # of the steps that were lost so far must be expected as gain, too
FORGIVEN = 0.01  # steps of what was lost, per round that drafts nothing
MOST_CREDIT = 8.0  # gains beyond this are not remembered against losses
MOST_LASTING_CREDIT = 30.0  # nor beyond this by a gate that stays shut: bad luck must not shut it
DEAREST_TRIAL = 0.5  # steps that a draft may cost before any has come true in a text
PATIENCE = 3.0  # a gate that stays shut shuts after such a loss


@dataclass(frozen=True)
class Auto(Drafter):
    """`auto` has no settings: `specjax tune machine` chooses them. Load it with `load_drafter`."""

    num_nodes = 1

    def propose(
        self, target: Target, params: Params, state: State, context: Context, draw: Draw
    ) -> tuple[Proposal, State]:
        raise SpecjaxError("method 'auto' is loaded with specjax.load_drafter")


@dataclass(frozen=True)
class Gated(Drafter):
    """`inner` behind a gate, for a machine whose rounds cost `costs`.

    A batch shares its passes, which are as wide as the widest draft that is let through. So the
    gate chooses a width for all rows: that at which most tokens per step are expected, 1 for none;
    rows whose drafts fit draft. What a row is expected to accept is a mean over its observations,
    older ones counting less; a shadow that has come true so far counts as if it went on as long
    again. Past losses make the gate cautious, so that a text on which the observations mislead it
    loses little.

    Nodes are dropped by what was known before their tokens were drawn, so under `coupled`
    verification the text stays that of plain decoding, and under `rejection` its distribution. But
    there, and under `typical`, the very tokens also depend on what is drafted: so the text of a row
    that is gated may depend on the others of its batch, and on what this machine's costs are.

    Costs are measured one text at a time. For a batch of B they are estimated: the passes over all
    rows cost what `row_costs` says of as many rows of one text, and what drafting takes beside them
    is the same. Without `row_costs` they are used as they are.

    Args:
        inner: drafts; without probe rows, which would run in every pass.
        row_widths: nodes of the passes that are compiled, root included, in ascending order.
        costs: of a whole round with a pass of so many nodes, in plain steps; the first of a round
            that drafts nothing.
        expected: drafted tokens that were accepted per round that drafted, when `inner` was tuned.
        asked_cost: of a round in which `inner` is asked and drafts nothing, in plain steps.
        row_costs: of the target's passes.

    Raises:
        SpecjaxError: for a drafter that cannot be gated, widths that do not begin with 1, do not
            ascend or do not hold its drafts, costs that are not theirs, or numbers that cannot be
            costs or tokens.
    """

    inner: Drafter
    row_widths: tuple[int, ...] = field()
    costs: tuple[float, ...]
    expected: float
    asked_cost: float = 1.0
    row_costs: RowCosts | None = None

    def __post_init__(self):
        if self.inner.num_probes or self.inner.num_nodes < 2 or isinstance(self.inner, Gated):
            raise SpecjaxError(
                f"{type(self.inner).__name__} cannot be gated: a gate takes drafters that draft, "
                "and that add no probe rows to every pass; use it without"
            )
        widths = self.row_widths
        is_ascending = list(widths) == sorted(set(widths)) and widths[:1] == (1,)
        if not is_ascending or widths[-1] < self.num_nodes:
            raise SpecjaxError(
                f"row_widths {widths} must ascend from 1 to at least {self.num_nodes}, the nodes "
                "of this drafter; run `specjax tune machine` again"
            )
        if len(self.costs) != len(widths) or not are_costs(self.costs):
            raise SpecjaxError(
                f"costs {self.costs} must be finite and positive, one for each of row_widths "
                f"{widths}; run `specjax tune machine` again"
            )
        for name, value, least in (
            ("expected", self.expected, 0),
            ("asked_cost", self.asked_cost, 1),
        ):
            if not (isfinite(value) and value >= least):
                raise SpecjaxError(
                    f"{name} {value} must be finite and at least {least}; run `specjax tune "
                    "machine` again"
                )

    @property
    def taps(self) -> Taps:
        return self.inner.taps

    @property
    def num_nodes(self) -> int:
        return self.inner.num_nodes

    @property
    def max_depth(self) -> int:
        return self.inner.max_depth

    def pass_costs(self, batch: int = 1) -> tuple[tuple[int, float], ...]:
        """Width of each pass that the loop compiles, and the cost of its round for `batch` texts.

        The last holds `num_nodes`.
        """
        pairs = [
            (width, self._cost(width, cost, batch))
            for width, cost in zip(self.row_widths, self.costs, strict=True)
        ]
        narrower = [pair for pair in pairs if pair[0] < self.num_nodes]
        return (*narrower, (self.num_nodes, pairs[len(narrower)][1]))

    def _cost(self, width: int, cost: float, batch: int) -> float:
        """Of a round with passes of that width, in plain steps of `batch` texts."""
        if self.row_costs is None:
            return cost
        of_pass = self.row_costs.at
        return (cost - of_pass(width) + of_pass(batch * width)) / of_pass(batch)

    def check(self, target: Target, params: Any) -> None:
        self.inner.check(target, params)

    def init(
        self, target: Target, params: Params, prompt: Prompt, prefill: ModelOutput, num_slots: int
    ) -> GateState:
        inner = self.inner.init(target, params, prompt, prefill, num_slots)
        return first_state(inner, prompt.length.shape[0], self.num_nodes - 1, self.expected)

    def propose(
        self, target: Target, params: Params, state: GateState, context: Context, draw: Draw
    ) -> tuple[Proposal, GateState]:
        def ask(context: Context, carry: tuple[DraftTree, State]) -> tuple[DraftTree, State]:
            proposal, inner = self.inner.propose(target, params, carry[1], context, draw)
            return proposal.tree, inner

        shape = jax.eval_shape(
            partial(self.inner.propose, target), params, state.inner, context, draw
        )[0].tree
        nothing = _root_only(shape, context.root)
        has_shadows = _has_shadows(params, shape)
        looks = self._looks(state) if has_shadows else state.is_open
        tree, inner = if_in_place(looks, ask, context, (nothing, state.inner))
        state = replace(state, inner=inner)
        if not has_shadows:
            return Proposal(tree), state
        num_valid = tree.num_valid()
        is_let_through = num_valid <= self._width(state, num_valid)
        is_new = looks & ~is_let_through & (state.shadow_length == 0)
        valid = tree.valid.at[:, 1:].set(tree.valid[:, 1:] & is_let_through[:, None])
        finds = jnp.any(~state.is_finished & (num_valid > 1))
        is_in_vain = looks & ~finds & ~self._might_pay(state)
        state = replace(
            state,
            shadow=jnp.where(is_new[:, None], tree.tokens[:, 1:], state.shadow),
            shadow_length=jnp.where(is_new, num_valid - 1, state.shadow_length),
            num_true=jnp.where(is_new, 0, state.num_true),
            wait=jnp.where(looks, state.pause, state.wait - 1),
            pause=jnp.where(is_in_vain, state.longer_pause, state.pause),
        )
        return Proposal(replace(tree, valid=valid)), state

    def update(
        self, target: Target, params: Params, state: GateState, outcome: Outcome
    ) -> GateState:
        def learn(outcome: Outcome, inner: State) -> State:
            return self.inner.update(target, params, inner, outcome)

        has_committed = outcome.context.length - 1 > outcome.root_slot
        has_shadows = _has_shadows(params, outcome.tree)
        if has_shadows:
            state = replace(state, inner=learn(outcome, state.inner))
            state = observe(state, outcome, has_committed)
        else:
            inner = if_in_place(state.is_open, learn, outcome, state.inner)
            state = replace(state, inner=inner)
        debt = self._debt(state, outcome, has_shadows)
        is_open = state.is_open & (debt <= PATIENCE)
        return replace(state, debt=debt, is_open=is_open, is_finished=~has_committed)

    def _might_pay(self, state: GateState) -> Bool[Array, ""]:
        return self._width(state, jnp.full_like(state.shadow_length, 2)) > 1

    def _looks(self, state: GateState) -> Bool[Array, ""]:
        """Whether to ask for drafts: they might pay now, or it is time for new shadows."""
        lacks_shadow = jnp.any(~state.is_finished & (state.shadow_length == 0))
        return self._might_pay(state) | (lacks_shadow & (state.wait <= 0))

    def _width(self, state: GateState, num_valid: Int[Array, " B"]) -> Int[Array, ""]:
        """Which drafts are let through: those with so many nodes at most. 1: none."""
        (_, plain), *drafting = self.pass_costs(num_valid.shape[0])
        widths, costs = map(np.array, zip(*drafting, strict=True))
        is_cheap = costs - plain <= DEAREST_TRIAL
        fits = (num_valid[None, :] > 1) & (num_valid[None, :] <= widths[:, None])
        fits = fits & (state.is_proven[None, :] | is_cheap[:, None])
        expected = jnp.where(fits, state.expected[None, :], 0.0)
        expected = jnp.where(state.is_finished[None, :], 0.0, expected)
        tokens = 1 + jnp.sum(expected, axis=1) / state.num_active
        best = jnp.argmax(tokens / jnp.asarray(costs, jnp.float32))
        gain = tokens[best] - jnp.asarray(1 + costs - plain, jnp.float32)[best]
        pays = gain > CAUTION * jnp.maximum(state.debt, 0)
        return jnp.where(pays, jnp.asarray(widths, jnp.int32)[best], 1)

    def _debt(self, state: GateState, outcome: Outcome, has_shadows: bool) -> Float[Array, ""]:
        """What the rounds so far have lost to plain decoding, this one included."""
        num_valid = outcome.tree.num_valid()
        batch = num_valid.shape[0]
        widths, costs = map(np.array, zip(*self.pass_costs(batch), strict=True))
        at = jnp.sum(jnp.max(num_valid) > widths[:-1])
        loss = jnp.asarray(costs - costs[0], jnp.float32)[at]
        accepted = jnp.where(state.is_finished, 0, outcome.verification.num_accepted)
        settled = state.debt + loss - jnp.sum(accepted) / state.num_active
        if has_shadows:
            credit = MOST_CREDIT
            without_draft = jnp.minimum(state.debt, jnp.maximum(state.debt - FORGIVEN, 0))
        else:
            credit = MOST_LASTING_CREDIT
            asked = self._cost(1, self.asked_cost, batch) - 1
            without_draft = state.debt + jnp.where(state.is_open, asked, 0)
        return jnp.where(at > 0, jnp.maximum(settled, -credit), without_draft)


def assumed(inner: Drafter, platform: str) -> Gated:
    """The gate of a machine that has not been measured.

    The costs are those of wide layers on two cores; elsewhere rows are taken to cost little. What
    drafting takes beside the passes is taken to be nothing.
    """
    known = {1: 1.0, 8: 2.3, 24: 2.9, 64: 4.5} if platform == "cpu" else {1: 1.0, 64: 1.1}
    row_costs = RowCosts(tuple(known), tuple(known.values()))
    costs = (1.0, row_costs.at(inner.num_nodes))
    return Gated(inner, (1, inner.num_nodes), costs, expected=2.0, row_costs=row_costs)


def _has_shadows(params: Params, tree: DraftTree) -> bool:
    """Whether drafts cost little, and can be compared with a text: chosen chains."""
    return params.drafter is None and tree.is_chain and tree.proposal is None


def _root_only(shape: DraftTree, root: Int[Array, " B"]) -> DraftTree:
    """A tree of the same form that drafts nothing."""
    tree = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape)
    return replace(
        tree,
        tokens=tree.tokens.at[:, 0].set(root),
        parents=tree.parents.at[:, 0].set(NO_PARENT),
        valid=tree.valid.at[:, 0].set(True),
    )
