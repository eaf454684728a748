"""Measures groups of methods on one target: compiled side by side, timed in turn with plain.

A row is a dictionary of plain values. Seconds and rates are first quartile, median and third
quartile. What fails is a row that states why, and stops nothing else.
"""

import gc
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.methods import PAPER_METHODS, Made, Published
from benchmarks.gpu.scripted import Scripted, script_of
from benchmarks.harness import CYCLE, cycling, random_target
from specjax import Engine, Generation, LoadedTarget, Params, Prompt, from_ids
from specjax.bench.bandwidth import bytes_per_pass
from specjax.bench.measure import PLAIN
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.run.engines import make_engine

Row = dict[str, Any]
Result = TypeVar("Result")
OUT_OF_MEMORY = "out of memory"
NUM_BYTES = {"cpu": 2**27}  # of the array that is copied; on other devices:
MANY_BYTES = 2**32
NUM_PASSES = 8


class Failure(Exception):
    """Stands in place of a result, or is raised where nothing works without one."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.row = {"failed": reason, "is_memory": reason == OUT_OF_MEMORY}


class Group(NamedTuple):
    """Methods that are measured at once, in turn with plain decoding."""

    part: str
    size: str = ""
    context: int = 0
    batch: int = 1
    methods: tuple[str, ...] = ()

    @property
    def place(self) -> tuple[str, str, int, int]:
        """Everything but the methods."""
        return self.part, self.size, self.context, self.batch

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the rows; in `rounds`, every method is measured with plain decoding."""
        if self.part == "bandwidth":
            return "copy", "read"
        return self.methods if self.part == "rounds" else (PLAIN, *self.methods)


class Programs(NamedTuple):
    """The two compiled parts of a generation."""

    engine: Engine
    prefill: Callable[..., Any]
    run: Callable[..., Any]
    seconds: float  # that compiling took


class Timed(NamedTuple):
    """A generation, and the seconds of a round in each timed run."""

    seconds: list[float]
    generation: Generation

    @property
    def quartiles(self) -> list[float]:
        """First quartile, median and third quartile."""
        return np.percentile(self.seconds, (25, 50, 75)).tolist()


class TimedRun(NamedTuple):
    """Programs, their inputs, and the number of rounds they run."""

    programs: Programs
    params: Params
    prompt: Prompt
    max_rounds: int

    def once(self) -> tuple[float, Generation]:
        """Returns the seconds of a round, without the prefill, and the generation."""
        state = self.programs.prefill(self.params, self.prompt, jax.random.key(0))
        jax.block_until_ready(state)
        began = time.perf_counter()
        state = jax.block_until_ready(self.programs.run(self.params, state, self.max_rounds))
        seconds = time.perf_counter() - began
        generation = jax.block_until_ready(self.programs.engine.generation(state))
        return seconds / int(np.max(np.asarray(generation.stats.rounds))), generation


class Case(NamedTuple):
    """A method at one accepted length."""

    name: str
    published: Published
    made: Made
    run: TimedRun


def attempt(work: Callable[[], Result]) -> Result | Failure:
    """Returns the result of `work`, or why it failed; unless memory ran out, with a traceback."""
    try:
        return work()
    except Failure as error:
        return Failure(str(error))  # without the frames, which hold arrays
    except Exception as error:  # whatever it is, the other measurements must not be lost
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            return Failure(OUT_OF_MEMORY)
        traceback.print_exc(file=sys.stderr)
        line = str(error).strip().partition("\n")[0]
        return Failure(f"{type(error).__name__}: {line}")


def needed(result: Result | Failure) -> Result:
    """Returns the result; raises the failure in its place."""
    if isinstance(result, Failure):
        raise result
    return result


def compiled(
    engines: Mapping[str, tuple[Engine, Params]], prompt: Prompt, num_threads: int
) -> dict[str, Programs | Failure]:
    """Compiles some engines; tracing goes one by one, XLA's work in threads."""

    def lower(engine: Engine, params: Params):
        engine.check(params, prompt)
        return engine.lower(params, prompt, jax.random.key(0))

    def compile_both(engine: Engine, lowered: Any, seconds: float) -> Programs:
        began = time.perf_counter()
        prefill, run = (program.compile() for program in needed(lowered))
        return Programs(engine, prefill, run, seconds + time.perf_counter() - began)

    with ThreadPoolExecutor(num_threads) as pool:
        started = {}
        for name, (engine, params) in engines.items():
            began = time.perf_counter()
            lowered = attempt(partial(lower, engine, params))
            work = partial(compile_both, engine, lowered, time.perf_counter() - began)
            started[name] = pool.submit(attempt, work)
        return {name: program.result() for name, program in started.items()}


def time_in_turn(
    runs: Mapping[str, TimedRun], repeats: int, has_time: Callable[[], bool]
) -> dict[str, Timed | Failure]:
    """Runs all once to warm up, then in turn, `repeats` times or while there is time.

    There are at least two timed runs of each, unless fewer `repeats` are asked for.
    """
    results: dict[str, Timed | Failure] = {}
    for name, run in runs.items():
        result = attempt(run.once)
        results[name] = result if isinstance(result, Failure) else Timed([], result[1])
    for repeat in range(repeats):
        if repeat >= 2 and not has_time():
            break
        for name, run in runs.items():
            if isinstance(timed := results[name], Timed):
                result = attempt(run.once)
                if isinstance(result, Failure):
                    results[name] = result
                else:
                    timed.seconds.append(result[0])
    return results


class GpuBench:
    """Measures groups; keeps the last target, and its plain decoding, for the next group."""

    def __init__(self, new_tokens: int, repeats: int, num_threads: int, longest: int):
        self.new_tokens, self.repeats, self.num_threads = new_tokens, repeats, num_threads
        self.longest = longest  # text of any group
        self._target: LoadedTarget | None = None
        self._plain: dict[tuple[int, int], tuple[TimedRun, jax.Array]] = {}  # by context and batch

    def measure(self, group: Group, has_time: Callable[[], bool]) -> list[Row]:
        """Returns the rows of a group; a failed row holds the reason as `failed`."""
        work = bandwidth_rows if group.part == "bandwidth" else partial(self._decode, has_time)
        rows = attempt(lambda: work(group))
        if isinstance(rows, Failure):
            return [_row(group, name, **rows.row) for name in group.names]
        return rows

    def _decode(self, has_time: Callable[[], bool], group: Group) -> list[Row]:
        target = self._target_of(group.size)
        prompt = random_prompt(target, group)
        plain, text = self._plain_run(target, prompt, group)
        cases, rows = self._cases(target, prompt, group, text)
        runs = {PLAIN: plain} | {label: case.run for label, case in cases.items()}
        timed = time_in_turn(runs, self.repeats, has_time)
        step = needed(timed[PLAIN])
        num_bytes = bytes_per_pass(target, group.context + self.new_tokens / 2, group.batch)
        if PLAIN in group.names:
            rows.append(_plain_row(group, step, num_bytes, plain.programs.seconds))
        for label, case in cases.items():
            row = _row(group, case.name, published=case.published._asdict())
            own = timed[label]
            if isinstance(own, Failure):
                rows.append(row | own.row)
                continue
            row["rows"] = case.made.drafter.pass_width
            row["compile_seconds"] = case.run.programs.seconds
            rows.append(row | _figures(own, step, 1 + case.made.num_bytes / num_bytes))
        return rows

    def _cases(
        self, target: LoadedTarget, prompt: Prompt, group: Group, text: jax.Array
    ) -> tuple[dict[str, Case], list[Row]]:
        """Returns all methods at all their accepted lengths, and rows of those that failed."""
        made = {name: attempt(partial(PAPER_METHODS[name].make, target)) for name in group.methods}
        rows = [
            _row(group, name, **own.row) for name, own in made.items() if isinstance(own, Failure)
        ]
        engines = {}
        for name, own in made.items():
            if isinstance(own, Made):
                script = script_of(own.drafter, own.params, text, 1.0)
                engines[name] = self._engine(target, Scripted(own.drafter), script)
        cases = {}
        for name, programs in compiled(engines, prompt, self.num_threads).items():
            if isinstance(programs, Failure):
                rows.append(_row(group, name, **programs.row))
                continue
            own = needed(made[name])
            for published in PAPER_METHODS[name].published:
                script = script_of(own.drafter, own.params, text, published.accepted_length)
                # Whole rounds only: the last one of a text would be cut.
                max_rounds = max(1, int((self.new_tokens - 1) / published.accepted_length))
                run = TimedRun(programs, Params(target.params, script), prompt, max_rounds)
                cases[f"{name}, {published.source}"] = Case(name, published, own, run)
        return cases, rows

    def _plain_run(
        self, target: LoadedTarget, prompt: Prompt, group: Group
    ) -> tuple[TimedRun, jax.Array]:
        """Returns plain decoding, and its text."""
        place = group.context, group.batch
        if place not in self._plain:
            engine, params = self._engine(target, Autoregressive())
            programs = needed(compiled({PLAIN: (engine, params)}, prompt, 1)[PLAIN])
            run = TimedRun(programs, params, prompt, self.new_tokens)
            self._plain[place] = run, run.once()[1].tokens
        return self._plain[place]

    def _engine(
        self, target: LoadedTarget, drafter: Any, params: Any = None
    ) -> tuple[Engine, Params]:
        return make_engine(target, (drafter, params), self.new_tokens, ignore_eos=True)

    def _target_of(self, size: str) -> LoadedTarget:
        if self._target is None or self._target.name != size:
            self._target = None  # so that two are never in memory
            self._plain.clear()
            gc.collect()
            target = random_target(size, self.longest)
            is_tied = target.config.tie_word_embeddings
            self._target = target if is_tied else cycling(target)
        return self._target


def bandwidth_rows(group: Group) -> list[Row]:
    """Times copying a large array, bytes read and written, and summing it up."""
    num_bytes = NUM_BYTES.get(jax.default_backend(), MANY_BYTES)
    numbers = jnp.arange(num_bytes // 4, dtype=jnp.float32)
    ways = {"copy": (jax.jit(lambda x: -x), 2 * num_bytes), "read": (jax.jit(jnp.sum), num_bytes)}
    rows = []
    for name, (program, moved) in ways.items():
        jax.block_until_ready(program(numbers))
        rates = []
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(NUM_PASSES):
                result = program(numbers)
            jax.block_until_ready(result)
            rates.append(NUM_PASSES * moved / (time.perf_counter() - began))
        rows.append(_row(group, name, bytes_per_second=np.percentile(rates, (25, 50, 75)).tolist()))
    return rows


def random_prompt(target: LoadedTarget, group: Group) -> Prompt:
    """Draws tokens of one cycle, so that every generated token has occurred before."""
    numbers = np.random.default_rng(group.context)
    few = min(CYCLE, target.config.vocab_size)
    return from_ids(numbers.integers(0, few, (group.batch, group.context)).tolist())


def _figures(timed: Timed, plain: Timed, floor_overhead: float) -> Row:
    """Compares the runs of a method with plain decoding in the same turns."""
    stats = timed.generation.stats
    rounds, length = np.asarray(stats.rounds), np.asarray(timed.generation.length)
    seconds, step = timed.quartiles[1], plain.quartiles[1]
    tokens_per_second = float(length.sum()) / (int(rounds.max()) * seconds)
    return {
        "accepted_length": float(stats.mean_accepted_length),
        "rounds": int(rounds.max()),
        "round_seconds": timed.quartiles,
        "plain_step_seconds": step,
        "overhead": seconds / step,
        "floor_overhead": floor_overhead,
        "tokens_per_second": tokens_per_second,
        "speed_over_plain": tokens_per_second * step / len(length),
        "runs": len(timed.seconds),
        "matches_plain": _same_text(timed, plain),
    }


def _plain_row(group: Group, plain: Timed, num_bytes: float, compile_seconds: float) -> Row:
    return _row(
        group,
        PLAIN,
        round_seconds=plain.quartiles,
        overhead=1.0,
        speed_over_plain=1.0,
        tokens_per_second=group.batch / plain.quartiles[1],
        bytes_per_step=num_bytes,
        compile_seconds=compile_seconds,
        runs=len(plain.seconds),
    )


def _same_text(timed: Timed, plain: Timed) -> bool:
    """Whether all rows match plain decoding, as far as they go."""
    own, other = np.asarray(timed.generation.tokens), np.asarray(plain.generation.tokens)
    is_new = np.arange(own.shape[1]) < np.asarray(timed.generation.length)[:, None]
    return bool(np.all((own == other) | ~is_new))


def _row(group: Group, method: str, **values: Any) -> Row:
    place = {"size": group.size, "context": group.context, "batch": group.batch}
    return {"part": group.part, **place, "method": method, **values}
