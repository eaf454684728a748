"""Paired measurement: every contestant runs the same prompts in turn and is compared in pairs.

Two parts are timed: the prefill, from padded prompts on the device until the state before the first
round is ready, and the decoding of all rounds. Tokenizing, padding, compiling and turning tokens
into text are not. Before anything is timed, `warm_up` compiles every program and loads its code.
"""

import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Sized
from itertools import cycle, groupby, islice
from random import Random
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from specjax.core.errors import throttled
from specjax.run.runner import COMPILED, GeneratedText, Program, Trial, compilations
from specjax.run.tasks import TaskPrompt

PLAIN = "plain"  # the method that all others are compared with
Step = TypeVar("Step")
Batch = tuple[TaskPrompt, ...]  # prompts of one kind that are served at once


@runtime_checkable
class Contestant(Protocol):
    """A method that can be measured: a `Runner`, whose methods it has, or another library.

    Without `has_prefill`, `decode` does everything. Only `prefill` and `decode` are timed; they
    return when their result is ready.
    """

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def has_prefill(self) -> bool: ...
    def prepare(self, sequences: Sequence[Sequence[int]], trial: Trial = (0, 0), /) -> Any: ...
    def compile(self, prepared: Any, /) -> Program: ...
    def prefill(self, prepared: Any, /) -> Any: ...
    def decode(self, state: Any, /) -> Any: ...
    def read(self, result: Any, /) -> tuple[GeneratedText, ...]: ...


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
        return (self.prefill_seconds or 0.0) + self.decode_seconds

    @property
    def trial(self) -> Trial:
        """The trial it belongs to, in which every contestant runs the same batch."""
        return self.number, self.repeat

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return sum(len(text.tokens) for text in self.texts)

    @property
    def passes(self) -> int:
        """Passes of the target: the rounds of the sequence that took most."""
        return max(text.rounds for text in self.texts)

    @property
    def round_seconds(self) -> float:
        """Seconds of decoding per pass."""
        return self.decode_seconds / max(self.passes, 1)

    @property
    def speed(self) -> float:
        """New tokens per second; prefill counts."""
        return self.num_tokens / self.seconds


def batches_of(prompts: Iterable[TaskPrompt], batch_size: int = 1) -> list[Batch]:
    """Groups prompts into batches of `batch_size` of one kind.

    The prompts of a kind must be consecutive. The last batch of a kind is filled with its first
    prompts.
    """
    batches: list[Batch] = []
    for _, group in groupby(prompts, key=lambda prompt: prompt.kind):
        of_kind = list(group)
        for first in range(0, len(of_kind), batch_size):
            batches.append(tuple(islice(cycle(of_kind), first, first + batch_size)))
    return batches


def warm_up(contestant: Contestant, batch: Batch) -> Program:
    """Compiles a contestant, runs it once, and returns its program."""
    prepared = contestant.prepare([prompt.ids for prompt in batch])
    program = contestant.compile(prepared)
    contestant.read(contestant.decode(contestant.prefill(prepared)))
    return program


def measure_trials(
    contestants: Sequence[Contestant],
    batches: Sequence[Batch],
    num_runs: int,
    finished: Container[Trial] = (),
    before_repeat: Callable[[], None] = lambda: None,
) -> Iterator[list[Sample]]:
    """Runs all contestants on all batches, `num_runs` times over, and yields trial by trial.

    In a trial all contestants run one batch, in an order that is shuffled each time, so that no
    method always follows the same one. The repeats of a batch are as far apart as possible, so
    that their spread shows whether the machine changed meanwhile.

    The contestants are compiled and warmed up. `finished` trials are left out, and `before_repeat`
    is called before the first trial of a repeat.
    """
    for repeat in range(num_runs):
        missing = [number for number in range(len(batches)) if (number, repeat) not in finished]
        if missing:
            before_repeat()
        for number in missing:
            order = Random(f"{number}, {repeat}").sample(contestants, len(contestants))
            yield [_timed(contestant, batches[number], number, repeat) for contestant in order]


def _timed(contestant: Contestant, batch: Batch, number: int, repeat: int) -> Sample:
    prepared = contestant.prepare([prompt.ids for prompt in batch], (number, repeat))
    num_before = compilations()[COMPILED]
    started = time.perf_counter()
    state = contestant.prefill(prepared)
    prefilled = time.perf_counter()
    result = contestant.decode(state)
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


def with_progress(steps: Iterable[Step], doing: str, count: int | None = None) -> Iterator[Step]:
    """Yields the same steps, with a progress bar or occasional lines on stderr."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    if count is None and isinstance(steps, Sized):
        count = len(steps)
    if console.is_terminal:
        yield from track(steps, doing, count, console=console, transient=True)
        return
    note, started = throttled(), time.monotonic()
    for number, step in enumerate(steps):
        text = f"{doing}: {number}"
        if count is not None and number:
            left = (time.monotonic() - started) / number * (count - number)
            text += f" of {count} (about {left:.0f} s left)"
        note(text)
        yield step
