"""Runs a request with one or more methods and times it without compilation."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Key

from specjax.core.text import decode, token_texts
from specjax.decoding.drafter import Params
from specjax.decoding.engine import Engine
from specjax.decoding.generate import parts_of
from specjax.decoding.prompt import Prompt
from specjax.decoding.state import Generation, LoopState
from specjax.loading.drafters import load_drafter
from specjax.loading.targets import LoadedTarget

STOPPED = "stop"  # the reason that a text ends: one of its stop texts


@dataclass(frozen=True, eq=False)
class Job:
    """One request and the method that serves it."""

    method: str
    engine: Engine
    params: Params
    target: LoadedTarget
    prompt: Prompt
    seed: int
    stop: tuple[str, ...] = ()  # texts that end it
    is_turn: bool = False  # of a conversation
    earlier: LoopState | None = None  # after the turn before

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
        """Compiles what `run` runs, loads all of its code, and returns the seconds.

        Raises:
            SpecjaxError: if the request cannot be served.
        """
        started = time.perf_counter()
        self.engine.check(self.params, self.prompt)
        key = jax.random.key(self.seed)
        begin = self._begin if self.is_turn else None
        self.engine.warm_up(self.params, self.prompt, key, begin)
        return time.perf_counter() - started

    def _begin(self, params: Params, prompt: Prompt, key: Key[Array, ""]) -> LoopState:
        if self.is_turn:
            return self.engine.resume(params, self.earlier, prompt, key)
        return self.engine.prefill(params, prompt, key)

    def run(self, show: Callable[[Generation], None] | None = None) -> "TimedRun":
        """Runs the request to its end.

        `show` gets the text as it grows, every few rounds; its own time does not count.
        """
        if show or self.stop:
            return self._run_in_parts(show or (lambda generation: None))
        engine, key = self.engine, jax.random.key(self.seed)
        started = time.perf_counter()
        state = self._begin(self.params, self.prompt, key)
        state = engine.run(self.params, state, engine.max_new_tokens)
        generation = jax.block_until_ready(engine.generation(state))
        seconds = time.perf_counter() - started
        generation.check()
        return TimedRun(generation, seconds, state)

    def _run_in_parts(self, show: Callable[[Generation], None]) -> "TimedRun":
        started = time.perf_counter()
        state = self._begin(self.params, self.prompt, jax.random.key(self.seed))
        parts = parts_of(self.engine, self.params, state)
        (generation, state), seconds = next(parts), time.perf_counter() - started
        while True:
            show(generation)
            started = time.perf_counter()
            is_stopped = self.stop and self.finish(generation).reason == STOPPED
            following = None if is_stopped else next(parts, None)
            seconds += time.perf_counter() - started
            if following is None:
                return TimedRun(generation, seconds, state)
            generation, state = following

    def finish(self, generation: Generation) -> "Finish":
        """Returns the tokens of a text up to the first stop text, its text, and why it ends."""
        tokens, tokenizer = new_tokens(generation), self.target.tokenizer
        whole = ""
        for count, text in enumerate(token_texts(tokenizer, tokens) if self.stop else (), 1):
            whole += text
            if ends := [whole.index(stop) for stop in self.stop if stop in whole]:
                return Finish(tokens[:count], whole[: min(ends)], STOPPED)
        text = None if tokenizer is None else decode(tokenizer, tokens)
        is_over = tokens[-1:] and tokens[-1] in self.engine.eos
        return Finish(tokens, text, "eos" if is_over else "length")


class TimedRun(NamedTuple):
    """A finished text, and what is left of its run."""

    generation: Generation
    seconds: float  # that it took
    state: LoopState


class Finish(NamedTuple):
    """The end of a text."""

    tokens: tuple[int, ...]
    text: str | None  # None without a tokenizer
    reason: str  # eos, stop or length


@dataclass(frozen=True)
class TimedText:
    """The text of one method, and its speed."""

    method: str
    tokens: tuple[int, ...]
    text: str | None
    finish_reason: str
    source: tuple[int, ...]  # where in prompt and output each was copied from; see Generation
    rounds: int
    mean_accepted_length: float
    seconds: float  # prefill and decoding; the median if there are several runs

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds


def time_in_turn(jobs: Sequence[Job], num_runs: int) -> list[TimedText]:
    """Runs all jobs in turn, `num_runs` times; they have been compiled."""
    runs = [job.run() for _ in range(num_runs) for job in jobs]
    return [timed_text(job, runs[number :: len(jobs)]) for number, job in enumerate(jobs)]


def timed_text(job: Job, runs: Sequence[TimedRun]) -> TimedText:
    """Returns the text of the first of several runs, and the median of their times."""
    generation = runs[0].generation
    tokens, text, reason = job.finish(generation)
    return TimedText(
        method=job.method,
        tokens=tokens,
        text=text,
        finish_reason=reason,
        source=tuple(np.asarray(generation.source)[0, : len(tokens)].tolist()),
        rounds=int(generation.stats.rounds[0]),
        mean_accepted_length=float(generation.stats.mean_accepted_length),
        seconds=median(run.seconds for run in runs),
    )


def new_tokens(generation: Generation) -> tuple[int, ...]:
    """Returns the tokens of the first row."""
    tokens = np.asarray(generation.tokens)[0, : int(generation.length[0])]
    return tuple(int(token) for token in tokens)
