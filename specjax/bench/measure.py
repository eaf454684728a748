"""Paired measurement: each method runs on the same prompt in turn, and is compared in pairs.

What is timed: one call of a method, from a padded prompt on the device until all that it returns is
ready, so prefill and all rounds and the checks of the request. What is not: tokenizing, padding,
compiling (every program runs twice before the first measured call) and turning tokens into text.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

PLAIN = "plain"  # what all others are compared with
PREFILL = "(prefill)"  # plain decoding of one token, measured beside the others
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class Request(NamedTuple):
    """One prompt, in tokens."""

    kind: str
    ids: tuple[int, ...]


class Answer(NamedTuple):
    """What a method said to one request."""

    tokens: tuple[int, ...]
    rounds: int  # passes of the target, prefill not counted


@runtime_checkable
class Contestant(Protocol):
    """A method as it is measured."""

    @property
    def name(self) -> str:
        """What its rows are called."""
        ...

    def prepare(self, ids: Sequence[int]) -> Any:
        """The request in the form that `run` takes; not timed."""
        ...

    def run(self, request: Any) -> Any:
        """Serves the request, and returns when the result is there; timed."""
        ...

    def read(self, result: Any) -> Answer:
        """The result in Python's own numbers; not timed."""
        ...


class Sample(NamedTuple):
    """One timed run."""

    method: str
    number: int  # of the prompt
    repeat: int
    answer: Answer
    seconds: float
    num_compiled: int  # programs compiled meanwhile; 0 if all is well


@dataclass(frozen=True)
class Measurement:
    """One method on all prompts of one kind."""

    method: str
    task: str
    num_prompts: int
    num_new_tokens: int  # of one run of each prompt
    rounds: int
    mean_accepted_length: float  # new tokens per round, pooled, bonus included
    seconds: float  # of one run of each prompt: the sum of the medians over the repeats
    prefill_seconds: float  # likewise, for plain decoding of one token: its part in `seconds`
    tokens_per_second: float
    spread: float  # interquartile range of a prompt's seconds over their median; median of prompts
    ratio: float  # speed over plain's, in pairs of runs (same prompt, same repeat): the median
    ratio_quartiles: tuple[float, float]
    num_different: int  # prompts where a run did not say what plain decoding said
    num_recompiled: int  # measured runs that compiled something, and so are not to be trusted
    compile_seconds: float  # of the first call, beyond a later one

    @property
    def identical(self) -> bool:
        """Whether every run said what plain decoding said."""
        return self.num_different == 0


def warm_up(contestants: Sequence[Contestant], ids: Sequence[int]) -> dict[str, float]:
    """Compiles every contestant; returns the seconds by name, those of a warm run taken off."""
    seconds = {}
    for contestant in contestants:
        request = contestant.prepare(ids)
        times = [time.perf_counter()]
        for _ in range(2):
            contestant.read(contestant.run(request))
            times.append(time.perf_counter())
        first, second = (after - before for before, after in pairwise(times))
        seconds[contestant.name] = max(first - second, 0.0)
    return seconds


def measure(
    contestants: Sequence[Contestant], requests: Sequence[Request], num_runs: int
) -> Iterator[Sample]:
    """Runs all contestants on each prompt, `num_runs` times, in an order that rotates."""
    for number, request in enumerate(requests):
        entries = [(contestant, contestant.prepare(request.ids)) for contestant in contestants]
        for repeat in range(num_runs):
            first = (number + repeat) % len(entries)
            for contestant, prepared in entries[first:] + entries[:first]:
                num_before = _compilations().count
                started = time.perf_counter()
                result = contestant.run(prepared)
                seconds = time.perf_counter() - started
                num_compiled = _compilations().count - num_before
                answer = contestant.read(result)
                yield Sample(contestant.name, number, repeat, answer, seconds, num_compiled)


def summarise(
    task: str, samples: Sequence[Sample], compile_seconds: Mapping[str, float]
) -> list[Measurement]:
    """One Measurement per method, in the order of `compile_seconds`; plain must be among them."""
    by_method = {
        name: [sample for sample in samples if sample.method == name] for name in compile_seconds
    }
    prefill_seconds = sum(map(median, _seconds(by_method.get(PREFILL, []))), start=0.0)
    return [
        _summary(task, own, by_method[PLAIN], prefill_seconds, compile_seconds[name])
        for name, own in by_method.items()
        if name != PREFILL
    ]


def _summary(
    task: str,
    samples: Sequence[Sample],
    plain: Sequence[Sample],
    prefill_seconds: float,
    compile_seconds: float,
) -> Measurement:
    answers = {sample.number: sample.answer for sample in samples}
    num_new_tokens = sum(len(answer.tokens) for answer in answers.values())
    rounds = sum(answer.rounds for answer in answers.values())
    times = _seconds(samples)
    medians = [median(own) for own in times]
    baseline = {(sample.number, sample.repeat): sample for sample in plain}
    pairs = [(sample, baseline[sample.number, sample.repeat]) for sample in samples]
    ratios = [_speed(own) / _speed(other) for own, other in pairs]
    low, middle, high = (float(value) for value in np.percentile(ratios, (25, 50, 75)))
    return Measurement(
        method=samples[0].method,
        task=task,
        num_prompts=len(answers),
        num_new_tokens=num_new_tokens,
        rounds=rounds,
        mean_accepted_length=num_new_tokens / max(rounds, 1),
        seconds=sum(medians),
        prefill_seconds=prefill_seconds,
        tokens_per_second=num_new_tokens / sum(medians),
        spread=median(_spread(own) for own in times),
        ratio=middle,
        ratio_quartiles=(low, high),
        num_different=len(
            {own.number for own, other in pairs if own.answer.tokens != other.answer.tokens}
        ),
        num_recompiled=sum(sample.num_compiled > 0 for sample in samples),
        compile_seconds=compile_seconds,
    )


def _seconds(samples: Sequence[Sample]) -> list[list[float]]:
    """The seconds of each prompt's runs."""
    by_prompt: dict[int, list[float]] = {}
    for sample in samples:
        by_prompt.setdefault(sample.number, []).append(sample.seconds)
    return list(by_prompt.values())


def _speed(sample: Sample) -> float:
    return len(sample.answer.tokens) / sample.seconds


def _spread(seconds: Sequence[float]) -> float:
    low, middle, high = np.percentile(seconds, (25, 50, 75))
    return float((high - low) / middle)


@dataclass
class _Compilations:
    """Counts the programs that JAX compiles in this process."""

    count: int = 0

    def listen(self, event: str, duration_secs: float, **_: Any) -> None:
        self.count += event == COMPILE_EVENT


@cache
def _compilations() -> _Compilations:
    counter = _Compilations()
    jax.monitoring.register_event_duration_secs_listener(counter.listen)
    return counter
