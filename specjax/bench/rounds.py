"""Summarises the timed parts of rounds: what drafting, verifying and committing cost.

Each part is compiled separately, which takes a little longer than a round in one program, so a
whole round is timed as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import numpy as np

from specjax.bench.measure import with_progress
from specjax.run.runner import Round, Runner

PARTS = ("draft", "verify", "rest")


@dataclass(frozen=True)
class RoundTrace:
    """All measured rounds of a method."""

    name: str
    rounds: Sequence[Round]
    one_program: float  # median seconds of a round compiled as one program

    @property
    def accepted_length(self) -> float:
        """Tokens per round, bonus included."""
        return sum(one.num_tokens for one in self.rounds) / len(self.rounds)

    @property
    def round_seconds(self) -> float:
        """Seconds of a round whose parts are medians."""
        return sum(self._median(part) for part in PARTS)

    def figures(self, plain: "RoundTrace", num_shown: int) -> dict[str, Any]:
        """Returns what tables and pictures show of the method; seconds are medians."""
        per_token = self.round_seconds / self.accepted_length
        drafts = [one.draft for one in self.rounds]
        shares = [one.draft / one.seconds for one in self.rounds]
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
        tokens = [one.num_tokens for one in self.rounds]
        runs = [tokens[at : at + count] for at in range(max(1, len(tokens) - count + 1))]
        return min(runs, key=lambda run: abs(sum(run) / len(run) - self.accepted_length))

    def _median(self, part: str) -> float:
        return median(getattr(one, part) for one in self.rounds)


def trace(runners: Sequence[Runner], prompts: Sequence[Sequence[int]]) -> list[RoundTrace]:
    """Measures all methods in turn on every prompt, after compiling."""
    for runner in with_progress(runners, "Compiling the parts of rounds", len(runners)):
        _time_rounds(runner, prompts[0])
    timed = [[_time_rounds(runner, ids) for runner in runners] for ids in prompts]
    traces = []
    for runner, of_method in zip(runners, zip(*timed, strict=True), strict=True):
        rounds = [one for of_prompt, _ in of_method for one in of_prompt]
        whole = [seconds for _, of_prompt in of_method for seconds in of_prompt]
        traces.append(RoundTrace(runner.name, rounds, median(whole)))
    return traces


def _time_rounds(runner: Runner, ids: Sequence[int]) -> tuple[list[Round], list[float]]:
    """Times a prompt's rounds part by part, then every round as one program."""
    prepared = runner.prepare([ids])
    return list(runner.rounds(prepared)), list(runner.round_seconds(prepared))


def trace_values(traces: Sequence[RoundTrace], num_shown: int) -> Mapping[str, Any]:
    """Returns the figures of all methods, plain decoding first, with some rounds to draw."""
    return {
        "device": jax.devices()[0].device_kind,
        "methods": [trace.figures(traces[0], num_shown) for trace in traces],
    }
