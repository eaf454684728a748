"""Run a request with one or more methods and time it, compilation apart."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import jax
import numpy as np

from specjax.decoding.drafter import Drafter, Params
from specjax.decoding.generate import speculative_generate, stream
from specjax.decoding.prompt import Prompt
from specjax.decoding.sampling import Sampling
from specjax.decoding.state import Generation
from specjax.hub import LoadedTarget
from specjax.loading import load_drafter

WARM_UP_ROUNDS = 8  # enough to run passes of several widths, whose code is loaded at first use


@dataclass(frozen=True, eq=False)
class Job:
    """One request and the method that serves it."""

    method: str
    drafter: Drafter
    params: Params
    target: LoadedTarget
    prompt: Prompt
    seed: int
    sampling: Sampling
    max_new_tokens: int

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The tokens of the prompt, without padding."""
        return tuple(np.asarray(self.prompt.tokens)[0, : int(self.prompt.length[0])].tolist())

    def with_plain(self) -> "Job":
        """The same request for plain decoding."""
        drafter, params = load_drafter("plain", self.target)
        return replace(
            self, method="plain", drafter=drafter, params=Params(self.target.params, params)
        )

    def run(self, max_rounds: int | None = None) -> tuple[Generation, float]:
        """The finished text, and the seconds that it took."""
        key = jax.random.key(self.seed)
        started = time.perf_counter()
        generation = speculative_generate(
            self.params, self.prompt, key, **self._settings(), max_rounds=max_rounds
        )
        jax.block_until_ready(generation)
        return generation, time.perf_counter() - started

    def compile(self) -> float:
        """Compiles what `run` runs, warms it up by a few rounds, and returns the seconds."""
        return self.run(max_rounds=WARM_UP_ROUNDS)[1]

    def stream(self) -> Iterator[Generation]:
        """The text so far, after every few rounds."""
        key = jax.random.key(self.seed)
        return stream(self.params, self.prompt, key, **self._settings())

    def compile_stream(self) -> float:
        """As `compile`, for what `stream` runs."""
        started = time.perf_counter()
        jax.block_until_ready(next(self.stream()))
        return time.perf_counter() - started

    def _settings(self) -> dict[str, Any]:
        return {
            "target": self.target.model,
            "drafter": self.drafter,
            "sampling": self.sampling,
            "max_new_tokens": self.max_new_tokens,
            "eos": self.target.eos,
        }


@dataclass(frozen=True)
class Measured:
    """What one method said, and how fast."""

    method: str
    tokens: tuple[int, ...]
    source: tuple[int, ...]  # where in prompt and output each was copied from; see Generation
    rounds: int
    mean_accepted_length: float
    seconds: float  # prefill and decoding; the median where there are several runs
    compile_seconds: float  # a few rounds of warming up included

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds


def measure(
    jobs: Sequence[Job], num_runs: int, tell: Callable[[Sequence[int]], None] | None = None
) -> list[Measured]:
    """Compiles every job, then runs all jobs in turn, `num_runs` times.

    `tell` gets the tokens of the very first run, once it is complete.
    """
    compile_seconds = [job.compile() for job in jobs]
    runs = []
    for _ in range(num_runs):
        for job in jobs:
            runs.append(job.run())
            if tell and len(runs) == 1:
                tell(new_tokens(runs[0][0]))
    return [
        _measured(job, runs[number :: len(jobs)], compile_seconds[number])
        for number, job in enumerate(jobs)
    ]


def _measured(
    job: Job, runs: Sequence[tuple[Generation, float]], compile_seconds: float
) -> Measured:
    generation, _ = runs[0]
    return Measured(
        method=job.method,
        tokens=new_tokens(generation),
        source=tuple(np.asarray(generation.source)[0, : int(generation.length[0])].tolist()),
        rounds=int(generation.stats.rounds[0]),
        mean_accepted_length=float(generation.stats.mean_accepted_length),
        seconds=median(seconds for _, seconds in runs),
        compile_seconds=compile_seconds,
    )


def new_tokens(generation: Generation) -> tuple[int, ...]:
    """The tokens of the first row."""
    tokens = np.asarray(generation.tokens)[0, : int(generation.length[0])]
    return tuple(int(token) for token in tokens)
