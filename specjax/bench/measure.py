"""Paired measurement: every contestant runs the same prompts in turn and is compared in pairs.

Two parts are timed: the prefill, from padded prompts on the device until the state before the first
round is ready, and the decoding of all rounds. Tokenizing, padding, compiling and turning tokens
into text are not. Before anything is timed, `warm_up` compiles every program and loads its code.
"""

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby
from random import Random
from typing import Any, NamedTuple, TypeVar

import jax
from jaxtyping import Array, Key

from specjax.core.errors import throttled
from specjax.run.tasks import Request

PLAIN = "plain"  # the method that all others are compared with
COMPILED = "/jax/core/compile/backend_compile_duration"
FROM_CACHE = "/jax/compilation_cache/cache_hits"
Step = TypeVar("Step")


Batch = tuple[Request, ...]  # prompts of one kind that are served at once
Turn = tuple[int, int]  # the number of a batch, and the repeat; each has noise of its own


class GeneratedText(NamedTuple):
    """The continuation of one prompt."""

    tokens: tuple[int, ...]
    rounds: int  # passes of the target, prefill not counted
    accepted_lengths: tuple[int, ...] = ()  # entry n: rounds that committed n tokens
    from_draft: tuple[bool, ...] = ()  # which tokens were drafted
    accepted: int | None = None  # drafted tokens, those cut off the text too; None: unknown

    @property
    def num_drafted(self) -> int:
        """Drafted tokens that were accepted, as far as that is known: every round adds one more."""
        return len(self.tokens) - self.rounds if self.accepted is None else self.accepted


class Program(NamedTuple):
    """The compilation time of a contestant's programs, and the memory they need."""

    compile_seconds: float = 0.0
    is_cached: bool = False  # at least a part came from a cache of compiled programs
    peak_bytes: int | None = None  # arguments, results and temporaries together


class Contestant(ABC):
    """A method that can be measured."""

    name: str
    dtype: str  # of weights and arithmetic
    max_rows: int | None = None  # the largest batch that it serves; None: any
    has_prefill: bool = True  # `start` is the prefill; if not, `finish` does everything

    @abstractmethod
    def prepare(self, rows: Sequence[Sequence[int]], turn: Turn = (0, 0)) -> Any:
        """Returns the prompts, with the noise of their turn, as `start` takes them; not timed."""

    @abstractmethod
    def compile(self, prepared: Any) -> Program:
        """Compiles what serves prompts of this shape, and loads all of its code."""

    @abstractmethod
    def start(self, prepared: Any) -> Any:
        """Prefills, and returns when that is done; timed."""

    @abstractmethod
    def finish(self, state: Any) -> Any:
        """Decodes to the end, and returns when the result is there; timed."""

    @abstractmethod
    def read(self, result: Any) -> tuple[GeneratedText, ...]:
        """Returns the result in Python's own numbers; not timed."""


class Sample(NamedTuple):
    """One timed run."""

    method: str
    dtype: str
    batch: Batch
    number: int  # of the batch
    repeat: int
    texts: tuple[GeneratedText, ...]
    prefill_seconds: float | None  # None: not measured separately
    decode_seconds: float
    num_compiled: int  # programs compiled during the run; 0 if all is well

    @property
    def seconds(self) -> float:
        """Seconds of prefill and decoding."""
        return (self.prefill_seconds or 0.0) + self.decode_seconds

    @property
    def turn(self) -> Turn:
        """The turn it belongs to: all contestants run one batch and are compared in pairs."""
        return self.number, self.repeat

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows."""
        return sum(len(text.tokens) for text in self.texts)

    @property
    def passes(self) -> int:
        """Passes of the target: the rounds of the row that took most."""
        return max(text.rounds for text in self.texts)

    @property
    def speed(self) -> float:
        """New tokens per second; prefill counts."""
        return self.num_tokens / self.seconds


def turn_key(seed: int, turn: Turn) -> Key[Array, ""]:
    """Returns the key of a turn, which all contestants share."""
    number, repeat = turn
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), repeat)


def batches_of(requests: Iterable[Request], num_rows: int = 1) -> list[Batch]:
    """Groups requests into batches of `num_rows` prompts of one kind.

    Requests of one kind stand together. The last batch of a kind is filled with its first prompts.
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
    """Compiles every contestant and runs it once; returns its programs by name."""
    programs = {}
    for contestant in contestants:
        prepared = contestant.prepare([request.ids for request in batch])
        programs[contestant.name] = contestant.compile(prepared)
        contestant.read(contestant.finish(contestant.start(prepared)))
    return programs


def measure_turns(
    contestants: Sequence[Contestant],
    batches: Sequence[Batch],
    num_runs: int,
    known: Container[Turn] = (),
    before_repeat: Callable[[], None] = lambda: None,
) -> Iterator[list[Sample]]:
    """Runs all contestants on all batches, `num_runs` times over, and yields turn by turn.

    In a turn all contestants run one batch, in an order that is shuffled each time, so that no
    method always follows the same one. The repeats of a batch lie as far apart as possible, so
    their spread shows a machine that changes meanwhile.

    Args:
        contestants: compiled and warmed up.
        batches: the prompts.
        num_runs: how often each contestant runs each batch.
        known: turns, by batch number and repeat, that are left out.
        before_repeat: called before the first turn of a repeat.
    """
    for repeat in range(num_runs):
        missing = [number for number in range(len(batches)) if (number, repeat) not in known]
        if missing:
            before_repeat()
        for number in missing:
            order = Random(f"{number}, {repeat}").sample(contestants, len(contestants))
            yield [_timed(each, batches[number], number, repeat) for each in order]


def measure(
    contestants: Sequence[Contestant], batches: Sequence[Batch], num_runs: int
) -> list[Sample]:
    """Runs all contestants on all batches in turn; see `measure_turns`."""
    return [run for turn in measure_turns(contestants, batches, num_runs) for run in turn]


def _timed(contestant: Contestant, batch: Batch, number: int, repeat: int) -> Sample:
    prepared = contestant.prepare([request.ids for request in batch], (number, repeat))
    num_before = compilations()[COMPILED]
    started = time.perf_counter()
    state = contestant.start(prepared)
    prefilled = time.perf_counter()
    result = contestant.finish(state)
    done = time.perf_counter()
    num_compiled = compilations()[COMPILED] - num_before
    if contestant.has_prefill:
        seconds = prefilled - started, done - prefilled
    else:
        seconds = None, done - started
    texts = contestant.read(result)
    return Sample(
        contestant.name, contestant.dtype, batch, number, repeat, texts, *seconds, num_compiled
    )


@cache
def compilations() -> Counter:
    """Returns the events of this process: `COMPILED` and `FROM_CACHE`, which counts as both."""
    counts = Counter()

    def listen(event: str, *_: Any, **__: Any) -> None:
        counts[event] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.monitoring.register_event_listener(listen)
    return counts


def with_progress(steps: Iterable[Step], doing: str, count: int | None = None) -> Iterable[Step]:
    """Yields the same steps, with a progress bar on stderr, or now and then a line."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    if console.is_terminal:
        return track(steps, doing, count, console=console, transient=True)
    return _with_lines(steps, doing, count)


def _with_lines(steps: Iterable[Step], doing: str, count: int | None) -> Iterator[Step]:
    note = throttled()
    for number, step in enumerate(steps):
        note(f"{doing}: {number}" if count is None else f"{doing}: {number} of {count}")
        yield step
