"""Runs of several drafters on the same prompts in turn: what all tuning compares."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, NamedTuple

import numpy as np

from specjax.bench.curves import Point
from specjax.bench.measure import with_progress
from specjax.decoding.drafter import Drafter
from specjax.decoding.sampling import Sampling
from specjax.loading.targets import LoadedTarget
from specjax.run.runner import Prepared, Runner

Ids = Sequence[int]  # a prompt in tokens
Goal = Literal["accepted-length", "speed"]


class Run(NamedTuple):
    """One timed run."""

    num_tokens: int
    num_rounds: int
    prefill_seconds: float
    decode_seconds: float

    @property
    def seconds_per_token(self) -> float:
        """Seconds of the whole run per new token."""
        return (self.prefill_seconds + self.decode_seconds) / self.num_tokens


def timed_run(runner: Runner, ids: Ids) -> Run:
    """Continues a prompt, and times that."""
    run = runner.run(_prepared(runner, ids))
    return Run(run.num_tokens, run.num_rounds, run.prefill_seconds, run.decode_seconds)


def num_drafting_rounds(runner: Runner, ids: Ids) -> int:
    """Counts the rounds of a text that draft anything."""
    return runner.num_drafting_rounds(_prepared(runner, ids))


def warm_up(runner: Runner, ids: Ids) -> None:
    """Compiles everything and runs it once."""
    runner.engine.warm_up(runner.params, *_prepared(runner, ids))
    timed_run(runner, ids)


def _prepared(runner: Runner, ids: Ids) -> Prepared:
    """Returns the padded prompt and its key, which depends on the prompt: repeats are the same."""
    return runner.prepare([ids], (zlib.crc32(np.asarray(ids, np.int32).tobytes()) >> 1, 0))


@dataclass(frozen=True)
class Workload:
    """Prompts of a target, and how they are continued."""

    target: LoadedTarget
    prompts: Sequence[Ids]
    max_new_tokens: int
    sampling: Sampling = Sampling()

    def runner(self, drafter: Drafter, params: Any = None) -> Runner:
        """Returns the runner of a drafter, warm."""
        runner = Runner.for_prompts(
            type(drafter).__name__,
            self.target,
            drafter,
            params,
            self.prompts,
            self.max_new_tokens,
            self.sampling,
        )
        warm_up(runner, self.prompts[0])
        return runner

    def sweep(self, candidates: Mapping[Any, tuple[Drafter, Any]]) -> list[Point]:
        """Runs each prompt once with each drafter and its params; returns a point per value."""
        given = with_progress(candidates.values(), "Compiling candidates", len(candidates))
        runners = [self.runner(*candidate) for candidate in given]
        turns = in_turn(runners, self.prompts)
        columns = zip(*with_progress(turns, "Measuring candidates", len(self.prompts)), strict=True)
        points = []
        for value, runs in zip(candidates, columns, strict=True):
            tokens = sum(run.num_tokens for run in runs)
            seconds = sum(run.prefill_seconds + run.decode_seconds for run in runs)
            points.append(
                Point(value, tokens / sum(run.num_rounds for run in runs), tokens / seconds)
            )
        return points


def in_turn(
    runners: Sequence[Runner], prompts: Sequence[Ids], turn: int = 0
) -> Iterator[list[Run]]:
    """Runs all runners on each prompt; yields their runs, prompt by prompt.

    The order is shuffled each time, so that no runner always follows the same one.
    """
    for number, ids in enumerate(prompts):
        order = Random(f"{number}, {turn}").sample(range(len(runners)), len(runners))
        runs = {each: timed_run(runners[each], ids) for each in order}
        yield [runs[each] for each in range(len(runners))]


def best(points: Sequence[Point], goal: Goal, close: float = 1.0) -> Any:
    """Returns the value of the highest speed, or the first with `close` times the highest
    accepted length."""
    if goal == "speed":
        return max(points, key=lambda point: point.tokens_per_second).value
    enough = close * max(point.accepted_length for point in points)
    return next(point.value for point in points if point.accepted_length >= enough)
