"""The rounds of a real generation, each part of them compiled and timed on its own.

Parts on their own cost a little more than a round in one program, as decoding compiles it: they
are started one by one, and what one hands to the next must be written. So that is measured too.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import jax

from specjax.bench.contestants import OwnMethod
from specjax.decoding.drafter import Drafter, Params, Proposal
from specjax.decoding.generate import start_loop
from specjax.decoding.round import conclude, draft, judge, one_round
from specjax.decoding.sampling import Draw, Sampling
from specjax.decoding.state import LoopState
from specjax.decoding.tree import Verification
from specjax.models.target import ModelOutput
from specjax.models.transformer import Transformer

PARTS = ("draft", "verify", "rest")

Watch = Callable[[Iterable[OwnMethod], str, int], Iterable[OwnMethod]]


class Round(NamedTuple):
    """One round as it was measured: seconds of its parts, and what it committed."""

    draft: float
    verify: float  # the target's pass and the verification
    rest: float  # the commit and what the drafter learns
    num_tokens: int


@dataclass(frozen=True)
class Trace:
    """All measured rounds of a method."""

    name: str
    rounds: Sequence[Round]
    one_program: float  # seconds of a round compiled as one program: the median

    def seconds(self, part: str) -> float:
        """The median over the rounds of `draft`, `verify` or `rest`."""
        return median(getattr(each, part) for each in self.rounds)

    @property
    def round_seconds(self) -> float:
        """A round of median parts."""
        return sum(map(self.seconds, PARTS))

    @property
    def accepted_length(self) -> float:
        """Tokens per round, bonus included."""
        return sum(each.num_tokens for each in self.rounds) / len(self.rounds)

    def excerpt(self, count: int) -> list[int]:
        """What `count` consecutive rounds committed: of all such, the first that comes closest to
        the accepted length."""
        tokens = [each.num_tokens for each in self.rounds]
        runs = [tokens[at : at + count] for at in range(max(1, len(tokens) - count + 1))]
        return min(runs, key=lambda run: abs(sum(run) / len(run) - self.accepted_length))


@dataclass(frozen=True)
class Plan:
    """What the programs of a method are compiled for."""

    target: Transformer
    drafter: Drafter
    sampling: Sampling
    max_new_tokens: int
    eos: tuple[int, ...]


def trace(
    contestants: Sequence[OwnMethod],
    prompts: Sequence[Sequence[int]],
    watch: Watch = lambda steps, doing, count: steps,
) -> list[Trace]:
    """Measures all methods in turn on every prompt, after compiling, which `watch` sees."""
    parts: list[list[Round]] = [[] for _ in contestants]
    whole: list[list[float]] = [[] for _ in contestants]
    for own in watch(contestants, "Compiling the parts of rounds", len(contestants)):
        rounds_in_parts(own, prompts[0])
        rounds_at_once(own, prompts[0])
    for ids in prompts:
        for own, some, others in zip(contestants, parts, whole, strict=True):
            some += rounds_in_parts(own, ids)
            others += rounds_at_once(own, ids)
    return [
        Trace(own.name, some, median(others))
        for own, some, others in zip(contestants, parts, whole, strict=True)
    ]


def figures(each: Trace, plain: Trace) -> dict[str, Any]:
    """What tables and JSON say of one method; seconds are medians."""
    per_token = each.round_seconds / each.accepted_length
    return {
        "method": each.name,
        "num_rounds": len(each.rounds),
        "accepted_length": each.accepted_length,
        **{f"{part}_seconds": each.seconds(part) for part in PARTS},
        "round_seconds": each.round_seconds,
        "one_program_seconds": each.one_program,
        "speed_over_plain": plain.round_seconds / plain.accepted_length / per_token,
        "one_program_speed_over_plain": each.accepted_length * plain.one_program / each.one_program,
    }


def told(traces: Sequence[Trace], count: int) -> Mapping[str, Any]:
    """The figures of all methods, plain decoding first, with `count` rounds to draw."""
    plain = traces[0]
    return {
        "device": jax.devices()[0].device_kind,
        "methods": [figures(each, plain) | {"excerpt": each.excerpt(count)} for each in traces],
    }


def rounds_in_parts(own: OwnMethod, ids: Sequence[int]) -> list[Round]:
    """Continues a prompt to its end, and tells of every round."""
    state, plan = _start(own, ids)
    found = []
    while not bool(state.is_done[0]):
        length, times = int(state.length[0]), [time.perf_counter()]
        state, proposal = jax.block_until_ready(_draft(own.params, state, plan))
        times.append(time.perf_counter())
        state, *judged = jax.block_until_ready(_judge(own.params, state, proposal, plan))
        times.append(time.perf_counter())
        state = jax.block_until_ready(_conclude(own.params, state, proposal, *judged, plan))
        times.append(time.perf_counter())
        drafting, verifying, rest = (after - before for before, after in pairwise(times))
        found.append(Round(drafting, verifying, rest, int(state.length[0]) - length))
    return found


def rounds_at_once(own: OwnMethod, ids: Sequence[int]) -> list[float]:
    """The seconds of every round where each is one program."""
    state, plan = _start(own, ids)
    found = []
    while not bool(state.is_done[0]):
        started = time.perf_counter()
        state = jax.block_until_ready(_whole(own.params, state, plan))
        found.append(time.perf_counter() - started)
    return found


def _start(own: OwnMethod, ids: Sequence[int]) -> tuple[LoopState, Plan]:
    plan = Plan(own.target.model, own.drafter, own.sampling, own.max_new_tokens, own.target.eos)
    state = start_loop(
        own.params,
        *own.prepare([ids]),
        target=plan.target,
        drafter=plan.drafter,
        max_new_tokens=plan.max_new_tokens,
    )
    return jax.block_until_ready(state), plan


# The state is donated, as decoding's own loop changes its caches in place.
_part = partial(jax.jit, static_argnames="plan", donate_argnames="state")


@_part
def _draft(params: Params, state: LoopState, plan: Plan) -> tuple[LoopState, Proposal]:
    return draft(params, state, plan.drafter, plan.sampling)


@_part
def _judge(
    params: Params, state: LoopState, proposal: Proposal, plan: Plan
) -> tuple[LoopState, ModelOutput, Verification]:
    draw = Draw(state.row_keys, state.length, plan.sampling)
    output, verification, cache = judge(
        params.target, state.cache, proposal, draw, plan.target, plan.drafter
    )
    return replace(state, cache=cache), output, verification


@_part
def _conclude(
    params: Params,
    state: LoopState,
    proposal: Proposal,
    output: ModelOutput,
    verification: Verification,
    plan: Plan,
) -> LoopState:
    tree, drafter = proposal.tree, plan.drafter
    return conclude(
        params, state, tree, output, verification, drafter, plan.max_new_tokens, plan.eos
    )


@_part
def _whole(params: Params, state: LoopState, plan: Plan) -> LoopState:
    return one_round(
        params,
        state,
        plan.target,
        plan.drafter,
        plan.sampling,
        plan.max_new_tokens,
        plan.eos,
    )
