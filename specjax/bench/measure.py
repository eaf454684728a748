"""Paired measurement: each method runs on the same prompt in turn, and is compared in pairs.

What is timed: one call of a method, from a padded prompt on the device until all that it returns is
ready, so prefill and all rounds and the checks of the request. What is not: tokenizing, padding,
compiling (every program runs twice before the first measured call) and turning tokens into text.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
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

    @property
    def dtype(self) -> str:
        """Of its weights and its arithmetic."""
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
    dtype: str
    request: Request
    number: int  # of the prompt
    repeat: int
    answer: Answer
    seconds: float
    num_compiled: int  # programs compiled meanwhile; 0 if all is well


class Verdict(IntEnum):
    """How a run's text compares with plain decoding's; the higher, the worse."""

    NOT_COMPARED = 0  # another dtype rounds otherwise, and another way may draw otherwise
    SAME = 1
    NEAR_TIE = 2  # other, from a place on where the dtype cannot tell two tokens apart
    DIFFERENT = 3


Judge = Callable[[Sample, Sample], Verdict]  # of a run and plain decoding's of the same prompt


@dataclass(frozen=True)
class Measurement:
    """One method on all prompts of one kind."""

    method: str
    dtype: str
    task: str
    num_prompts: int
    num_new_tokens: int  # of one run of each prompt
    rounds: int
    mean_accepted_length: float  # new tokens per round, pooled, bonus included
    mean_length: float  # tokens of prompt and text so far, mean over the rounds
    seconds: float  # of one run of each prompt: the sum of the medians over the repeats
    prefill_seconds: float  # likewise, for plain decoding of one token: its part in `seconds`
    tokens_per_second: float
    spread: float  # interquartile range of a prompt's seconds over their median; median of prompts
    ratio: float  # speed over plain's, in pairs of runs (same prompt, same repeat): the median
    ratio_quartiles: tuple[float, float]
    is_compared: bool  # with what plain decoding said: not if the dtype or the drawing is another
    num_near_ties: int  # prompts where a run said something else, but only from a near tie on
    num_different: int  # prompts where a run said something else without that excuse
    num_recompiled: int  # measured runs that compiled something, and so are not to be trusted
    compile_seconds: float  # of the first call, beyond a later one
    bandwidth_share: float | None = None  # of what the device can read; not known of peers

    @property
    def identical(self) -> bool | None:
        """Whether every run said what plain decoding said; None if that is not compared."""
        return self.num_near_ties + self.num_different == 0 if self.is_compared else None


def exactly(own: Sample, plain: Sample) -> Verdict:
    """The judge that accepts no difference within one dtype."""
    if own.dtype != plain.dtype:
        return Verdict.NOT_COMPARED
    is_same = own.answer.tokens == plain.answer.tokens
    return Verdict.SAME if is_same else Verdict.DIFFERENT


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
                yield Sample(
                    contestant.name,
                    contestant.dtype,
                    request,
                    number,
                    repeat,
                    contestant.read(result),
                    seconds,
                    num_compiled,
                )


def summarise(
    task: str,
    samples: Sequence[Sample],
    compile_seconds: Mapping[str, float],
    judge: Judge = exactly,
) -> list[Measurement]:
    """One Measurement per method, in the order of `compile_seconds`; plain must be among them."""
    by_method = {
        name: [sample for sample in samples if sample.method == name] for name in compile_seconds
    }
    prefill_seconds = sum(map(median, _seconds(by_method.get(PREFILL, []))), start=0.0)
    return [
        _summary(task, own, by_method[PLAIN], prefill_seconds, compile_seconds[name], judge)
        for name, own in by_method.items()
        if name != PREFILL
    ]


def _summary(
    task: str,
    samples: Sequence[Sample],
    plain: Sequence[Sample],
    prefill_seconds: float,
    compile_seconds: float,
    judge: Judge,
) -> Measurement:
    by_prompt = {sample.number: sample for sample in samples}.values()
    num_new_tokens = sum(len(sample.answer.tokens) for sample in by_prompt)
    rounds = sum(sample.answer.rounds for sample in by_prompt)
    times = _seconds(samples)
    medians = [median(own) for own in times]
    baseline = {(sample.number, sample.repeat): sample for sample in plain}
    pairs = [(sample, baseline[sample.number, sample.repeat]) for sample in samples]
    ratios = [_speed(own) / _speed(other) for own, other in pairs]
    low, middle, high = (float(value) for value in np.percentile(ratios, (25, 50, 75)))
    verdicts = _verdicts(pairs, judge)
    return Measurement(
        method=samples[0].method,
        dtype=samples[0].dtype,
        task=task,
        num_prompts=len(by_prompt),
        num_new_tokens=num_new_tokens,
        rounds=rounds,
        mean_accepted_length=num_new_tokens / max(rounds, 1),
        mean_length=sum(map(_length_over_rounds, by_prompt)) / max(rounds, 1),
        seconds=sum(medians),
        prefill_seconds=prefill_seconds,
        tokens_per_second=num_new_tokens / sum(medians),
        spread=median(_spread(own) for own in times),
        ratio=middle,
        ratio_quartiles=(low, high),
        is_compared=not verdicts[Verdict.NOT_COMPARED],
        num_near_ties=verdicts[Verdict.NEAR_TIE],
        num_different=verdicts[Verdict.DIFFERENT],
        num_recompiled=sum(sample.num_compiled > 0 for sample in samples),
        compile_seconds=compile_seconds,
    )


def _verdicts(pairs: Sequence[tuple[Sample, Sample]], judge: Judge) -> Counter[Verdict]:
    """Prompts by the worst verdict on their runs."""
    worst: dict[int, Verdict] = {}
    for own, plain in pairs:
        verdict = judge(own, plain)
        worst[own.number] = max(worst.get(own.number, verdict), verdict)
    return Counter(worst.values())


def _length_over_rounds(sample: Sample) -> float:
    """The length of the text, summed over the rounds: it grows evenly."""
    mean = len(sample.request.ids) + len(sample.answer.tokens) / 2
    return mean * sample.answer.rounds


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
