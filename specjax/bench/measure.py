"""Paired measurement: each method runs on the same prompts in turn, and is compared in pairs.

What is timed, in two parts: the prefill, from padded prompts on the device until the state before
the first round is ready, and the decoding of all rounds. What is not: tokenizing, padding,
compiling (every program runs before the first measured call) and turning tokens into text.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from random import Random
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

PLAIN = "plain"  # what all others are compared with
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
CACHE_EVENT = "/jax/compilation_cache/cache_hits"
NUM_WARM_RUNS = 2


class Request(NamedTuple):
    """One prompt, in tokens."""

    kind: str
    ids: tuple[int, ...]


Batch = tuple[Request, ...]  # prompts of one kind that are served at once


class Text(NamedTuple):
    """What was said to one prompt."""

    tokens: tuple[int, ...]
    rounds: int  # passes of the target, prefill not counted
    accepted_lengths: tuple[int, ...] = ()  # entry n: rounds that committed n tokens
    from_draft: tuple[bool, ...] = ()  # which tokens were drafted


class Program(NamedTuple):
    """What it took to compile a contestant, and what it needs to run."""

    compile_seconds: float = 0.0
    is_cached: bool = False  # at least a part came from a cache of compiled programs
    peak_bytes: int | None = None  # arguments, results and temporaries together


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

    @property
    def most_rows(self) -> int | None:
        """The largest batch that it serves; None: any."""
        ...

    @property
    def has_prefill(self) -> bool:
        """Whether `start` is the prefill; if not, `finish` does everything."""
        ...

    def prepare(self, rows: Sequence[Sequence[int]]) -> Any:
        """The prompts in the form that `start` takes; not timed."""
        ...

    def compile(self, prepared: Any) -> Program:
        """Compiles what serves prompts of this shape."""
        ...

    def start(self, prepared: Any) -> Any:
        """Prefills, and returns when that is done; timed."""
        ...

    def finish(self, state: Any) -> Any:
        """Decodes to the end, and returns when the result is there; timed."""
        ...

    def read(self, result: Any) -> tuple[Text, ...]:
        """The result in Python's own numbers; not timed."""
        ...


class Sample(NamedTuple):
    """One timed run."""

    method: str
    dtype: str
    batch: Batch
    number: int  # of the batch
    repeat: int
    texts: tuple[Text, ...]
    prefill_seconds: float | None  # None: not told apart
    decode_seconds: float
    num_compiled: int  # programs compiled meanwhile; 0 if all is well

    @property
    def seconds(self) -> float:
        """Of prefill and decoding."""
        return (self.prefill_seconds or 0.0) + self.decode_seconds

    @property
    def turn(self) -> tuple[int, int]:
        """The turn it belongs to: all methods run one batch, and are compared in pairs."""
        return self.number, self.repeat

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows."""
        return sum(len(text.tokens) for text in self.texts)

    @property
    def passes(self) -> int:
        """Passes of the target: the rounds of the row that took most."""
        return max(text.rounds for text in self.texts)


Seen = Callable[[str, int, int], bool]  # method, number of the batch, repeat


def batches_of(requests: Iterable[Request], num_rows: int = 1) -> list[Batch]:
    """Batches of `num_rows` prompts of one kind; the last is filled up with the kind's first ones.

    Requests of one kind stand together.
    """
    batches: list[Batch] = []
    for _, group in groupby(requests, key=lambda request: request.kind):
        of_kind = list(group)
        for first in range(0, len(of_kind), num_rows):
            rows = of_kind[first : first + num_rows]
            while len(rows) < num_rows:
                rows += of_kind[: num_rows - len(rows)]
            batches.append(tuple(rows))
    return batches


def warm_up(contestants: Sequence[Contestant], batch: Batch) -> dict[str, Program]:
    """Compiles every contestant and runs it; returns what that took, by name."""
    programs = {}
    for contestant in contestants:
        prepared = contestant.prepare([request.ids for request in batch])
        programs[contestant.name] = contestant.compile(prepared)
        for _ in range(NUM_WARM_RUNS):
            contestant.read(contestant.finish(contestant.start(prepared)))
    return programs


def measure(
    contestants: Sequence[Contestant],
    batches: Sequence[Batch],
    num_runs: int,
    seen: Seen = lambda method, number, repeat: False,
    before_repeat: Callable[[], None] = lambda: None,
) -> Iterator[Sample]:
    """Runs all contestants on all batches, `num_runs` times over.

    In a turn all contestants run one batch, in an order that is shuffled each time, so no method
    always follows the same one. The repeats of a batch lie as far apart as they can, so their
    spread tells of a machine that changes meanwhile. Runs that were `seen` are left out;
    `before_repeat` is called before the first of a repeat that was not.
    """
    for repeat in range(num_runs):
        is_new = True
        for number, batch in enumerate(batches):
            order = Random(f"{number}, {repeat}").sample(contestants, len(contestants))
            for contestant in order:
                if seen(contestant.name, number, repeat):
                    continue
                if is_new:
                    before_repeat()
                is_new = False
                yield _timed(contestant, batch, number, repeat)


def _timed(contestant: Contestant, batch: Batch, number: int, repeat: int) -> Sample:
    prepared = contestant.prepare([request.ids for request in batch])
    num_before = compilations().num_compiled
    started = time.perf_counter()
    state = contestant.start(prepared)
    prefilled = time.perf_counter()
    result = contestant.finish(state)
    done = time.perf_counter()
    num_compiled = compilations().num_compiled - num_before
    if contestant.has_prefill:
        seconds = prefilled - started, done - prefilled
    else:
        seconds = None, done - started
    texts = contestant.read(result)
    return Sample(
        contestant.name, contestant.dtype, batch, number, repeat, texts, *seconds, num_compiled
    )


@dataclass
class Compilations:
    """Counts what JAX compiles in this process, or takes from a cache of compiled programs."""

    counts: dict[str, int] = field(default_factory=lambda: {COMPILE_EVENT: 0, CACHE_EVENT: 0})

    def listen(self, event: str, *_: Any, **__: Any) -> None:
        """Called by JAX."""
        if event in self.counts:
            self.counts[event] += 1

    @property
    def num_compiled(self) -> int:
        """Programs compiled, or taken from a cache: both take time."""
        return self.counts[COMPILE_EVENT]

    @property
    def num_cached(self) -> int:
        """Programs taken from a cache."""
        return self.counts[CACHE_EVENT]


@cache
def compilations() -> Compilations:
    """The counter of this process."""
    counter = Compilations()
    jax.monitoring.register_event_duration_secs_listener(counter.listen)
    jax.monitoring.register_event_listener(counter.listen)
    return counter
