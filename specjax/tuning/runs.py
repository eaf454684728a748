"""Runs several drafters on the same prompts in turn, to compare them for tuning."""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, NamedTuple

import numpy as np

from specjax.bench.curves import Curve, Point
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
    def seconds(self) -> float:
        """Seconds of prefill and decoding."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def seconds_per_token(self) -> float:
        """Seconds of the whole run per new token."""
        return self.seconds / self.num_tokens


@dataclass(frozen=True)
class Workload:
    """The prompts that tuning measures, and how their target continues them."""

    target: LoadedTarget
    prompts: Sequence[Ids]
    max_new_tokens: int
    sampling: Sampling = Sampling()

    def runner(self, drafter: Drafter, params: Any = None, name: str = "") -> Runner:
        """Returns the runner of a drafter, warm."""
        method = name, self.target, drafter, params
        runner = Runner.for_prompts(*method, self.prompts, self.max_new_tokens, self.sampling)
        warm_up(runner, self.prompts[0])
        return runner

    def sweep(self, candidates: Mapping[Any, tuple[Drafter, Any]]) -> list[Point]:
        """Runs each prompt once with each drafter and its params; returns a point per value."""
        loaded = with_progress(candidates.values(), "Compiling candidates", len(candidates))
        runners = [self.runner(*candidate) for candidate in loaded]
        trials = in_turn(runners, self.prompts)
        trials = with_progress(trials, "Measuring candidates", len(self.prompts))
        points = []
        for value, runs in zip(candidates, zip(*trials, strict=True), strict=True):
            tokens = sum(run.num_tokens for run in runs)
            accepted_length = tokens / sum(run.num_rounds for run in runs)
            points.append(Point(value, accepted_length, tokens / sum(run.seconds for run in runs)))
        return points

    def pick(
        self,
        title: str,
        setting: str,
        candidates: Mapping[Any, tuple[Drafter, Any]],
        report: Callable[[Curve], None],
        goal: Goal = "speed",
        tolerance: float = 1.0,
    ) -> Any:
        """Sweeps a setting, reports its curve, and returns the best value; see `best`."""
        points = self.sweep(candidates)
        report(Curve(title, setting, {"accepted length": points}))
        return best(points, goal, tolerance)


def best(points: Sequence[Point], goal: Goal, tolerance: float = 1.0) -> Any:
    """Returns the value of the highest speed, or the first whose accepted length is at least
    `tolerance` times the highest."""
    if goal == "speed":
        return max(points, key=lambda point: point.tokens_per_second).value
    enough = tolerance * max(point.accepted_length for point in points)
    return next(point.value for point in points if point.accepted_length >= enough)


def in_turn(
    runners: Sequence[Runner], prompts: Sequence[Ids], repeat: int = 0
) -> Iterator[list[Run]]:
    """Runs all runners on each prompt; yields their runs, prompt by prompt.

    The order is shuffled each time, so that no runner always follows the same one.
    """
    for number, ids in enumerate(prompts):
        order = Random(f"{number}, {repeat}").sample(range(len(runners)), len(runners))
        runs = {index: timed_run(runners[index], ids) for index in order}
        yield [runs[index] for index in range(len(runners))]


def timed_run(runner: Runner, ids: Ids) -> Run:
    """Continues a prompt and times it."""
    generation, _, *seconds = runner.run(_prepared(runner, ids))
    return Run(int(generation.length[0]), int(generation.stats.rounds[0]), *seconds)


def num_drafting_rounds(runner: Runner, ids: Ids) -> int:
    """Counts the rounds of a text that draft anything."""
    return runner.num_drafting_rounds(_prepared(runner, ids))


def warm_up(runner: Runner, ids: Ids) -> None:
    """Compiles everything and runs it once."""
    runner.engine.warm_up(runner.params, *_prepared(runner, ids))
    timed_run(runner, ids)


def _prepared(runner: Runner, ids: Ids) -> Prepared:
    """Returns the padded prompt and its key, which depends on the prompt: repeats are equal."""
    return runner.prepare([ids], (zlib.crc32(np.asarray(ids, np.int32).tobytes()) >> 1, 0))
