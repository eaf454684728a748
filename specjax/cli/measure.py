"""Run a request with one or more methods and time it, compilation apart."""

import time
from collections.abc import Iterator, Sequence
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
from specjax.hub import Target, load_drafter


@dataclass(frozen=True, eq=False)
class Job:
    """One request and the method that serves it."""

    method: str
    drafter: Drafter
    params: Params
    target: Target
    prompt: Prompt
    seed: int
    sampling: Sampling
    max_new_tokens: int

    def with_plain(self) -> "Job":
        """The same request for plain decoding."""
        drafter, params = load_drafter("plain", self.target)
        return replace(
            self, method="plain", drafter=drafter, params=Params(self.target.params, params)
        )

    def run(self) -> tuple[Generation, float]:
        """The finished text, and the seconds that it took."""
        key = jax.random.key(self.seed)
        started = time.perf_counter()
        generation = speculative_generate(self.params, self.prompt, key, **self._settings())
        jax.block_until_ready(generation)
        return generation, time.perf_counter() - started

    def stream(self) -> Iterator[Generation]:
        """The text so far, after every few rounds."""
        key = jax.random.key(self.seed)
        return stream(self.params, self.prompt, key, **self._settings())

    def compile_stream(self) -> float:
        """Compiles what `stream` runs, and returns the seconds that it took."""
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
    rounds: int
    mean_accepted_length: float
    seconds: float  # prefill and decoding; the median where there are several runs
    compile_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds


def measure(jobs: Sequence[Job], num_runs: int) -> list[Measured]:
    """Runs every job once to compile it, then all jobs in turn, `num_runs` times."""
    first = [job.run() for job in jobs]
    seconds = [[job.run()[1] for job in jobs] for _ in range(num_runs)]
    results = []
    for job, (generation, first_seconds), times in zip(
        jobs, first, zip(*seconds, strict=True), strict=True
    ):
        typical = median(times)
        results.append(
            Measured(
                method=job.method,
                tokens=new_tokens(generation),
                rounds=int(generation.stats.rounds[0]),
                mean_accepted_length=float(generation.stats.mean_accepted_length),
                seconds=typical,
                compile_seconds=max(first_seconds - typical, 0.0),
            )
        )
    return results


def new_tokens(generation: Generation) -> tuple[int, ...]:
    """The tokens of the first row."""
    tokens = np.asarray(generation.tokens)[0, : int(generation.length[0])]
    return tuple(int(token) for token in tokens)
