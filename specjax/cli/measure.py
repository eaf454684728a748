"""Generates the text of a prompt with one or more methods, and times it without compilation."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

import jax
import numpy as np

from specjax.core.text import decode, token_texts
from specjax.decoding.drafter import Params
from specjax.decoding.engine import Engine
from specjax.decoding.prompt import Prompt
from specjax.decoding.state import Generation, LoopState
from specjax.loading.drafters import load_drafter
from specjax.loading.targets import LoadedTarget
from specjax.run.runner import Prepared, Runner, TimedRun

STOPPED = "stop"  # the reason that a text ends: one of its stop texts


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """One prompt, and the runner that continues it."""

    runner: Runner
    target: LoadedTarget
    prompt: Prompt
    stop: tuple[str, ...] = ()  # texts that end it
    is_turn: bool = False  # of a conversation
    earlier: LoopState | None = None  # after the previous turn

    @property
    def engine(self) -> Engine:
        """The runner's engine."""
        return self.runner.engine

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The tokens of the prompt, without padding."""
        return tuple(np.asarray(self.prompt.tokens)[0, : int(self.prompt.length[0])].tolist())

    def with_plain(self) -> "GenerationRequest":
        """Returns the same request for plain decoding."""
        drafter, params = load_drafter("plain", self.target)
        engine, params = replace(self.engine, drafter=drafter), Params(self.target.params, params)
        return replace(
            self, runner=replace(self.runner, name="plain", engine=engine, params=params)
        )

    def check(self) -> None:
        """Checks the request before anything is compiled."""
        self.engine.check(self.runner.params, self.prompt)

    def compile(self) -> float:
        """Compiles the programs of `run`, loads all of their code, and returns the seconds."""
        started = time.perf_counter()
        self.check()
        begin = (lambda *_: self._begin()) if self.is_turn else None
        self.engine.warm_up(self.runner.params, *self._prepared, begin)
        return time.perf_counter() - started

    def run(self, show: Callable[[Generation], None] | None = None) -> TimedRun:
        """Generates to the end.

        `show` gets the text as it grows, every few rounds; its own time does not count.
        """
        if self.stop and show is None:
            show = lambda generation: None  # noqa: E731
        begin = self._begin if self.is_turn else None
        return self.runner.run(self._prepared, begin, show, self._is_stopped)

    @property
    def _prepared(self) -> Prepared:
        return self.prompt, jax.random.key(self.runner.seed)

    def _begin(self) -> LoopState:
        return self.engine.resume(self.runner.params, self.earlier, *self._prepared)

    def _is_stopped(self, generation: Generation) -> bool:
        return bool(self.stop) and self.finish(generation).reason == STOPPED

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


def time_in_turn(requests: Sequence[GenerationRequest], num_runs: int) -> list[TimedText]:
    """Runs all requests in turn, `num_runs` times; they have been compiled."""
    runs = [request.run() for _ in range(num_runs) for request in requests]
    return [
        timed_text(request, runs[number :: len(requests)])
        for number, request in enumerate(requests)
    ]


def timed_text(request: GenerationRequest, runs: Sequence[TimedRun]) -> TimedText:
    """Returns the text of the first of several runs, and the median of their times."""
    generation = runs[0].generation
    tokens, text, reason = request.finish(generation)
    return TimedText(
        method=request.runner.name,
        tokens=tokens,
        text=text,
        finish_reason=reason,
        source=tuple(np.asarray(generation.source)[0, : len(tokens)].tolist()),
        rounds=int(generation.stats.rounds[0]),
        mean_accepted_length=float(generation.stats.mean_accepted_length),
        seconds=median(run.seconds for run in runs),
    )


def new_tokens(generation: Generation) -> tuple[int, ...]:
    """Returns the tokens of the first sequence."""
    tokens = np.asarray(generation.tokens)[0, : int(generation.length[0])]
    return tuple(int(token) for token in tokens)
