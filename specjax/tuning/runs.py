"""Runs of several drafters on the same prompts in turn: what all tuning compares."""

import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from specjax.bench.curves import Point
from specjax.bench.measure import with_progress
from specjax.decoding.drafter import Drafter, Params
from specjax.decoding.engine import Engine
from specjax.decoding.prompt import Prompt, from_ids, padded_length
from specjax.decoding.sampling import Sampling
from specjax.loading.targets import LoadedTarget

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


@dataclass(frozen=True)
class Runner:
    """A drafter that continues prompts of a target, one at a time."""

    engine: Engine
    params: Params
    padded_length: int  # one for all prompts, so that one program serves them all

    def given(self, ids: Ids) -> tuple[Prompt, jax.Array]:
        """Returns the padded prompt and its key, on the device.

        The key follows from the prompt: repeats say the same, and only the machine differs.
        """
        key = jax.random.key(zlib.crc32(np.asarray(ids, np.int32).tobytes()))
        return jax.block_until_ready((from_ids([ids], self.padded_length), key))

    def warm_up(self, ids: Ids) -> None:
        """Compiles everything and runs it once."""
        self.engine.warm_up(self.params, *self.given(ids))
        self.run(ids)

    def run(self, ids: Ids) -> Run:
        """Continues a prompt, and times that."""
        given = self.given(ids)
        started = time.perf_counter()
        state = jax.block_until_ready(self.engine.prefill(self.params, *given))
        prefilled = time.perf_counter()
        state = self.engine.run(self.params, state, self.engine.max_new_tokens)
        found = jax.block_until_ready(self.engine.generation(state))
        seconds = prefilled - started, time.perf_counter() - prefilled
        return Run(int(found.length[0]), int(found.stats.rounds[0]), *seconds)

    def num_drafting_rounds(self, ids: Ids) -> int:
        """Counts the rounds of a text that draft anything."""
        state = self.engine.prefill(self.params, *self.given(ids))
        drafted = [0]
        while not bool(state.is_done[0]):
            state = self.engine.run(self.params, state, len(drafted))
            drafted.append(int(state.stats.drafted[0]))
        return len(set(drafted)) - 1


@dataclass(frozen=True)
class Workload:
    """Prompts of a target, and how they are continued."""

    target: LoadedTarget
    prompts: Sequence[Ids]
    max_new_tokens: int
    sampling: Sampling = Sampling()

    def runner(self, drafter: Drafter, params: Any = None) -> Runner:
        """Returns the runner of a drafter, warm."""
        target = self.target
        engine = Engine(target.model, drafter, self.sampling, self.max_new_tokens, target.eos)
        length = padded_length(self.prompts)
        runner = Runner(engine, Params(target.params, params), length)
        runner.warm_up(self.prompts[0])
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
        runs = {each: runners[each].run(ids) for each in order}
        yield [runs[each] for each in range(len(runners))]


def best(points: Sequence[Point], goal: Goal, close: float = 1.0) -> Any:
    """Returns the value of the highest speed, or the first with `close` times the highest
    accepted length."""
    if goal == "speed":
        return max(points, key=lambda point: point.tokens_per_second).value
    enough = close * max(point.accepted_length for point in points)
    return next(point.value for point in points if point.accepted_length >= enough)
