"""Generates the text of a prompt with one or more methods, and times it without compilation."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import jax
import numpy as np

from specjax.bench.measure import PLAIN
from specjax.core.text import EndingText
from specjax.decoding.engine import Engine
from specjax.decoding.prompt import Prompt
from specjax.decoding.state import Generation, LoopState
from specjax.loading.drafters import load_drafter
from specjax.loading.targets import LoadedTarget
from specjax.run.attribution import Span, sources_in_prompt, spans_of
from specjax.run.runner import Prepared, Runner, TimedRun
from specjax.run.text import Completion, completion


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """One prompt, and the runner that continues it."""

    runner: Runner
    target: LoadedTarget
    prompt: Prompt
    stop: tuple[str, ...] = ()  # texts that end it
    is_answer: bool = True  # to a message, rather than the continuation of a text
    is_turn: bool = False  # of a conversation
    earlier: LoopState | None = None  # after the previous turn

    @property
    def engine(self) -> Engine:
        return self.runner.engine

    def with_plain(self) -> "GenerationRequest":
        drafter, params = load_drafter("plain", self.target)
        engine = replace(self.engine, drafter=drafter)
        params = self.runner.params._replace(drafter=params)
        runner = replace(self.runner, name="plain", engine=engine, params=params)
        return replace(self, runner=runner)

    def check(self) -> None:
        self.engine.check(self.runner.params, self.prompt)

    def compile(self) -> float:
        """Compiles the programs of `run`, loads all of their code, and returns the seconds."""
        started = time.perf_counter()
        self.check()
        begin = (lambda *_: self._begin()) if self.is_turn else None
        self.engine.warm_up(self.runner.params, *self._prepared, begin)
        return time.perf_counter() - started

    def run(self, show: Callable[[Generation], None] | None = None) -> TimedRun:
        """Generates to the end; `show` gets the text as it grows, as in `Runner.run`."""
        begin = self._begin if self.is_turn else None
        is_over = self._is_stopped if self.stop else None
        return self.runner.run(self._prepared, begin, show, is_over)

    @property
    def _prepared(self) -> Prepared:
        return self.prompt, jax.random.key(self.runner.seed)

    def _begin(self) -> LoopState:
        return self.engine.resume(self.runner.params, self.earlier, *self._prepared)

    def ending(self) -> EndingText:
        """Returns the new text before its first token."""
        before = () if self.is_answer else self.prompt.ids[0]
        return EndingText(self.target.tokenizer, self.stop, before)

    def _is_stopped(self, generation: Generation) -> bool:
        return self.finish(generation).finish_reason == "stop"

    def finish(self, generation: Generation) -> Completion:
        """Returns the text up to the first stop text."""
        return completion(self.ending(), generation, 0, self.engine.eos, is_done=True)


@dataclass(frozen=True)
class TimedText(Completion):
    """The text of one method, and its speed."""

    request: GenerationRequest
    generation: Generation
    seconds: float  # prefill and decoding; the median of several runs

    @property
    def method(self) -> str:
        return self.request.runner.name

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds

    @property
    def is_lossy(self) -> bool:
        return self.request.engine.sampling.is_lossy and self.method != PLAIN

    @property
    def spans(self) -> list[Span]:
        """The copied spans, each with its original source in the prompt."""
        source = np.asarray(self.generation.source)[0, : len(self.tokens)].tolist()
        return spans_of(sources_in_prompt(source, int(self.request.prompt.length[0])))

    def record(self, compile_seconds: float) -> dict[str, Any]:
        target, sampling = self.request.target, self.request.engine.sampling
        return {
            "target": target.name,
            "dtype": str(target.dtype),
            "padded_width": target.model.padded_width,
            "method": self.method,
            "seed": self.request.runner.seed,
            "temperature": sampling.temperature,
            "verification": sampling.verification,
            "is_lossy": self.is_lossy,
            "text": None if target.tokenizer is None else self.text,
            "finish_reason": self.finish_reason,
            "tokens": self.tokens,
            "num_new_tokens": len(self.tokens),
            "rounds": self.rounds,
            "mean_accepted_length": round(self.mean_accepted_length, 6),
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "compile_seconds": compile_seconds,
            **({} if self.logprobs is None else {"logprobs": self.logprobs}),
        }


def time_in_turn(requests: Sequence[GenerationRequest], num_runs: int) -> list[TimedText]:
    """Runs all requests in turn, `num_runs` times; they have been compiled."""
    runs = zip(*([request.run() for request in requests] for _ in range(num_runs)), strict=True)
    return list(map(timed_text, requests, runs))


def timed_text(request: GenerationRequest, runs: Sequence[TimedRun]) -> TimedText:
    """Returns the text of the first of several runs, and the median of their times."""
    generation, seconds = runs[0].generation, median(run.seconds for run in runs)
    done = vars(request.finish(generation))
    return TimedText(**done, request=request, generation=generation, seconds=seconds)
