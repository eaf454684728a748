"""Runs a request with one or more methods and times it without compilation."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import jax
import numpy as np

from specjax.decoding.drafter import Params
from specjax.decoding.engine import Engine
from specjax.decoding.generate import stream
from specjax.decoding.prompt import Prompt
from specjax.decoding.state import Generation
from specjax.hub import LoadedTarget
from specjax.loading import load_drafter


@dataclass(frozen=True, eq=False)
class Job:
    """One request and the method that serves it."""

    method: str
    engine: Engine
    params: Params
    target: LoadedTarget
    prompt: Prompt
    seed: int

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The tokens of the prompt, without padding."""
        return tuple(np.asarray(self.prompt.tokens)[0, : int(self.prompt.length[0])].tolist())

    def with_plain(self) -> "Job":
        """Returns the same request for plain decoding."""
        drafter, params = load_drafter("plain", self.target)
        engine, params = replace(self.engine, drafter=drafter), Params(self.target.params, params)
        return replace(self, method="plain", engine=engine, params=params)

    def compile(self) -> float:
        """Compiles what `run` and `stream` run, loads all of its code, and returns the seconds.

        Raises:
            SpecjaxError: if the request cannot be served.
        """
        started = time.perf_counter()
        self.engine.check(self.params, self.prompt)
        self.engine.warm_up(self.params, self.prompt, jax.random.key(self.seed))
        return time.perf_counter() - started

    def run(self) -> tuple[Generation, float]:
        """Returns the finished text, and the seconds that it took."""
        engine, key = self.engine, jax.random.key(self.seed)
        started = time.perf_counter()
        state = engine.prefill(self.params, self.prompt, key)
        state = engine.run(self.params, state, engine.max_new_tokens)
        generation = jax.block_until_ready(engine.generation(state))
        seconds = time.perf_counter() - started
        generation.check()
        return generation, seconds

    def stream(self) -> Iterator[Generation]:
        """Returns the text so far, after every few rounds."""
        return stream(
            self.params,
            self.prompt,
            jax.random.key(self.seed),
            target=self.engine.target,
            drafter=self.engine.drafter,
            sampling=self.engine.sampling,
            max_new_tokens=self.engine.max_new_tokens,
            eos=self.engine.eos,
        )


@dataclass(frozen=True)
class TimedText:
    """The text of one method, and its speed."""

    method: str
    tokens: tuple[int, ...]
    source: tuple[int, ...]  # where in prompt and output each was copied from; see Generation
    rounds: int
    mean_accepted_length: float
    seconds: float  # prefill and decoding; the median if there are several runs
    compile_seconds: float  # includes a round of warming up at each width

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds


def time_in_turn(
    jobs: Sequence[Job], num_runs: int, show: Callable[[Sequence[int]], None] | None = None
) -> list[TimedText]:
    """Compiles every job, then runs all jobs in turn, `num_runs` times.

    `show` gets the tokens of the very first run, once it is complete.
    """
    compile_seconds = [job.compile() for job in jobs]
    runs = []
    for _ in range(num_runs):
        for job in jobs:
            runs.append(job.run())
            if show and len(runs) == 1:
                show(new_tokens(runs[0][0]))
    return [
        _timed_text(job, runs[number :: len(jobs)], compile_seconds[number])
        for number, job in enumerate(jobs)
    ]


def _timed_text(
    job: Job, runs: Sequence[tuple[Generation, float]], compile_seconds: float
) -> TimedText:
    generation, _ = runs[0]
    return TimedText(
        method=job.method,
        tokens=new_tokens(generation),
        source=tuple(np.asarray(generation.source)[0, : int(generation.length[0])].tolist()),
        rounds=int(generation.stats.rounds[0]),
        mean_accepted_length=float(generation.stats.mean_accepted_length),
        seconds=median(seconds for _, seconds in runs),
        compile_seconds=compile_seconds,
    )


def new_tokens(generation: Generation) -> tuple[int, ...]:
    """Returns the tokens of the first row."""
    tokens = np.asarray(generation.tokens)[0, : int(generation.length[0])]
    return tuple(int(token) for token in tokens)
