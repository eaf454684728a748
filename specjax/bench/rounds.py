"""Times the parts of each round of a real generation, each part compiled on its own.

Separate parts take a little longer than a round in one program, as decoding compiles it: each is
started from the host and must write what it hands over. So a whole round is timed as well.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.bench.contestants import OwnMethod
from specjax.bench.measure import with_progress
from specjax.decoding.drafter import Params, Proposal
from specjax.decoding.engine import Engine
from specjax.decoding.state import LoopState
from specjax.decoding.tree import Verification
from specjax.models.target import ModelOutput

PARTS = ("draft", "verify", "rest")


class RoundTimes(NamedTuple):
    """The seconds of a round's parts, and how many tokens it committed."""

    draft: float
    verify: float  # the target pass and the verification
    rest: float  # the commit and the drafter's update
    num_tokens: int


@dataclass(frozen=True)
class RoundTrace:
    """All measured rounds of a method."""

    name: str
    rounds: Sequence[RoundTimes]
    one_program: float  # median seconds of a round compiled as one program

    @property
    def accepted_length(self) -> float:
        """Tokens per round, bonus included."""
        return sum(each.num_tokens for each in self.rounds) / len(self.rounds)

    @property
    def round_seconds(self) -> float:
        """Seconds of a round whose parts are medians."""
        return sum(self._median(part) for part in PARTS)

    def figures(self, plain: "RoundTrace", num_shown: int) -> dict[str, Any]:
        """Returns what tables and pictures show of the method; seconds are medians."""
        per_token = self.round_seconds / self.accepted_length
        drafts = [each.draft for each in self.rounds]
        shares = [each.draft / sum(each[: len(PARTS)]) for each in self.rounds]
        return {
            "method": self.name,
            "num_rounds": len(self.rounds),
            "accepted_length": self.accepted_length,
            **{f"{part}_seconds": self._median(part) for part in PARTS},
            "draft_quartiles": np.percentile(drafts, (25, 75)).tolist(),
            "draft_share_quartiles": np.percentile(shares, (25, 50, 75)).tolist(),
            "round_seconds": self.round_seconds,
            "one_program_seconds": self.one_program,
            "speed_over_plain": plain.round_seconds / plain.accepted_length / per_token,
            "one_program_speed_over_plain": self.accepted_length
            * plain.one_program
            / self.one_program,
            "excerpt": self.excerpt(num_shown),
        }

    def excerpt(self, count: int) -> list[int]:
        """Returns the tokens of `count` consecutive rounds: those closest to the average round."""
        tokens = [each.num_tokens for each in self.rounds]
        runs = [tokens[at : at + count] for at in range(max(1, len(tokens) - count + 1))]
        return min(runs, key=lambda run: abs(sum(run) / len(run) - self.accepted_length))

    def _median(self, part: str) -> float:
        return median(getattr(each, part) for each in self.rounds)


def trace(contestants: Sequence[OwnMethod], prompts: Sequence[Sequence[int]]) -> list[RoundTrace]:
    """Measures all methods in turn on every prompt, after compiling."""
    parts: list[list[RoundTimes]] = [[] for _ in contestants]
    whole: list[list[float]] = [[] for _ in contestants]
    for own in with_progress(contestants, "Compiling the parts of rounds", len(contestants)):
        rounds_in_parts(own, prompts[0])
        rounds_at_once(own, prompts[0])
    for ids in prompts:
        for own, some, others in zip(contestants, parts, whole, strict=True):
            some += rounds_in_parts(own, ids)
            others += rounds_at_once(own, ids)
    return [
        RoundTrace(own.name, some, median(others))
        for own, some, others in zip(contestants, parts, whole, strict=True)
    ]


def trace_values(traces: Sequence[RoundTrace], num_shown: int) -> Mapping[str, Any]:
    """Returns the figures of all methods, plain decoding first, with some rounds to draw."""
    return {
        "device": jax.devices()[0].device_kind,
        "methods": [each.figures(traces[0], num_shown) for each in traces],
    }


def rounds_in_parts(own: OwnMethod, ids: Sequence[int]) -> list[RoundTimes]:
    """Continues a prompt to its end and times the parts of every round."""
    state = own.start(own.prepare([ids]))
    found = []
    while not bool(state.is_done[0]):
        length, times = int(state.length[0]), [time.perf_counter()]
        state, proposal = jax.block_until_ready(_propose(own.engine, own.params, state))
        times.append(time.perf_counter())
        state, *verified = jax.block_until_ready(_verify(own.engine, own.params, state, proposal))
        times.append(time.perf_counter())
        state = jax.block_until_ready(_commit(own.engine, own.params, state, proposal, *verified))
        times.append(time.perf_counter())
        drafting, verifying, rest = (after - before for before, after in pairwise(times))
        found.append(RoundTimes(drafting, verifying, rest, int(state.length[0]) - length))
    return found


def rounds_at_once(own: OwnMethod, ids: Sequence[int]) -> list[float]:
    """Continues a prompt to its end and returns the seconds of every round as one program."""
    state = own.start(own.prepare([ids]))
    found = []
    while not bool(state.is_done[0]):
        started = time.perf_counter()
        state = jax.block_until_ready(_round(own.engine, own.params, state))
        found.append(time.perf_counter() - started)
    return found


# The state is donated, as decoding's own loop changes its caches in place.
_part = partial(jax.jit, static_argnames="engine", donate_argnames="state")


@_part
def _propose(engine: Engine, params: Params, state: LoopState) -> tuple[LoopState, Proposal]:
    return engine.propose(params, state)


@_part
def _verify(
    engine: Engine, params: Params, state: LoopState, proposal: Proposal
) -> tuple[LoopState, ModelOutput, Verification]:
    output, verification, cache = engine.verify(params, state, proposal)
    return replace(state, cache=cache), output, verification


@_part
def _commit(
    engine: Engine,
    params: Params,
    state: LoopState,
    proposal: Proposal,
    output: ModelOutput,
    verification: Verification,
) -> LoopState:
    return engine.commit(params, state, proposal.tree, output, verification)


@_part
def _round(engine: Engine, params: Params, state: LoopState) -> LoopState:
    return engine.round(params, state)
