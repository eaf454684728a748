"""The parts of the GPU report: what each group of measurements runs, and the rows that it gives.

A row is a dictionary of plain values, one line of the report's JSON. Seconds and rates are given as
first quartile, median and third quartile.
"""

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.bench.bandwidth import bytes_per_pass
from specjax.bench.gpu.methods import METHODS, Base, Made, Published
from specjax.bench.gpu.scripted import Scripted, script_of
from specjax.bench.gpu.timing import (
    Failure,
    Run,
    Setting,
    Timed,
    attempt,
    compiled,
    in_turn,
    needed,
)
from specjax.bench.shapes import CYCLE, cycling, random_target
from specjax.decoding.drafter import Params
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.decoding.prompt import from_ids
from specjax.hub import LoadedTarget

Row = dict[str, Any]
PARTS = ("bandwidth", "plain", "rounds", "batch", "context")
PLAIN = "plain"
NUM_BYTES = {"cpu": 2**27}  # of the array that is copied; on other devices:
MANY_BYTES = 2**32
NUM_PASSES = 8


class Group(NamedTuple):
    """What is measured at once, interleaved with plain decoding."""

    part: str
    size: str = ""
    context: int = 0
    batch: int = 1
    methods: tuple[str, ...] = ()

    @property
    def where(self) -> tuple[str, str, int, int]:
        """All but the methods."""
        return self.part, self.size, self.context, self.batch

    @property
    def title(self) -> str:
        """As one line."""
        where = f" {self.size}, context {self.context}, batch {self.batch}" if self.size else ""
        return f"{self.part}{where}: {', '.join(self.names)}"

    @property
    def names(self) -> tuple[str, ...]:
        """What has rows of its own; in `rounds`, plain decoding is told beside every method."""
        if self.part == "bandwidth":
            return "copy", "read"
        return self.methods if self.part == "rounds" else (PLAIN, *self.methods)


class Case(NamedTuple):
    """A method at one accepted length."""

    name: str
    published: Published
    made: Made
    run: Run


class Bench:
    """Measures groups; keeps the last target, and how it decodes plainly, for the next group."""

    def __init__(self, new_tokens: int, repeats: int, num_threads: int, longest: int):
        self.new_tokens, self.repeats, self.num_threads = new_tokens, repeats, num_threads
        self.longest = longest  # text that is asked for
        self._size, self._base = "", None
        self._plain: dict[tuple[int, int], tuple[Run, Array]] = {}  # by context and batch

    def measure(self, group: Group, has_time: Callable[[], bool]) -> list[Row]:
        """The rows of a group; those of what failed hold `failed`, the reason."""
        work = bandwidth_rows if group.part == "bandwidth" else partial(self._decode, has_time)
        rows = attempt(lambda: work(group))
        if isinstance(rows, Failure):
            return [_row(group, name, **rows.told) for name in group.names]
        return rows

    def _decode(self, has_time: Callable[[], bool], group: Group) -> list[Row]:
        base = self._target(group.size)
        setting = Setting(base, _prompt(base, group), self.new_tokens)
        plain, text = self._plain_run(setting, group)
        cases, rows = self._cases(setting, group, text)
        runs = {PLAIN: plain} | {label: case.run for label, case in cases.items()}
        timed = in_turn(setting, runs, self.repeats, has_time)
        step = needed(timed[PLAIN])
        num_bytes = _bytes(base, group, self.new_tokens)
        if PLAIN in group.names:
            rows.append(_plain_row(group, step, num_bytes, plain.program.seconds))
        for label, case in cases.items():
            row = _row(group, case.name, published=case.published._asdict())
            own = timed[label]
            if isinstance(own, Failure):
                rows.append(row | own.told)
                continue
            row["rows"] = case.made.drafter.num_nodes + case.made.drafter.num_probes
            row["compile_seconds"] = case.run.program.seconds
            rows.append(row | _figures(own, step, 1 + case.made.num_bytes / num_bytes))
        return rows

    def _cases(
        self, setting: Setting, group: Group, text: Array
    ) -> tuple[dict[str, Case], list[Row]]:
        """All methods at all their accepted lengths, and rows of those that cannot be."""
        base, asked, rows = setting.base, {}, []
        made = {name: attempt(partial(METHODS[name].make, base)) for name in group.methods}
        for name, own in made.items():
            if isinstance(own, Failure):
                rows.append(_row(group, name, **own.told))
            else:
                script = script_of(own.drafter, own.params, text, 1.0)
                asked[name] = Scripted(own.drafter), Params(base.params, script)
        cases = {}
        for name, program in compiled(setting, asked, self.num_threads).items():
            if isinstance(program, Failure):
                rows.append(_row(group, name, **program.told))
                continue
            own = needed(made[name])
            for published in METHODS[name].published:
                script = script_of(own.drafter, own.params, text, published.accepted_length)
                # Whole rounds only: the last one of a text would be cut.
                max_rounds = max(1, int((self.new_tokens - 1) / published.accepted_length))
                run = Run(program, Params(base.params, script), max_rounds)
                cases[f"{name}, {published.source}"] = Case(name, published, own, run)
        return cases, rows

    def _plain_run(self, setting: Setting, group: Group) -> tuple[Run, Array]:
        """Plain decoding, and what it says."""
        where = group.context, group.batch
        if where not in self._plain:
            params = Params(setting.base.params)
            program = needed(compiled(setting, {PLAIN: (Autoregressive(), params)}, 1)[PLAIN])
            run = Run(program, params, self.new_tokens)
            timed = needed(in_turn(setting, {PLAIN: run}, 0, lambda: True)[PLAIN])
            self._plain[where] = run, timed.generation.tokens
        return self._plain[where]

    def _target(self, size: str) -> Base:
        if size != self._size:
            self._size, self._base = "", None  # so that two are never in memory
            self._plain.clear()
            gc.collect()
            model, params, dtype = random_target(size, self.longest)
            if not model.config.tie_word_embeddings:
                params = cycling(params)
            self._size, self._base = size, Base(model, params, dtype)
        assert self._base is not None
        return self._base


def bandwidth_rows(group: Group) -> list[Row]:
    """Bytes per second of copying a large array, bytes read and written, and of summing it up."""
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


def _figures(timed: Timed, plain: Timed, floor_overhead: float) -> Row:
    """What the runs of a method say, against plain decoding in the same turns."""
    stats = timed.generation.stats
    rounds, length = np.asarray(stats.rounds), np.asarray(timed.generation.length)
    seconds, step = timed.quartiles[1], plain.quartiles[1]
    total = int(rounds.max()) * seconds
    tokens_per_second = float(length.sum()) / total
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
        "says_what_plain_says": _same_text(timed, plain),
    }


def _plain_row(group: Group, plain: Timed, num_bytes: float, compile_seconds: float) -> Row:
    return _row(
        group,
        PLAIN,
        step_seconds=plain.quartiles,
        tokens_per_second=group.batch / plain.quartiles[1],
        bytes_per_step=num_bytes,
        compile_seconds=compile_seconds,
        runs=len(plain.seconds),
    )


def _same_text(timed: Timed, plain: Timed) -> bool:
    """Whether all rows say what plain decoding says, as far as they go."""
    own, other = np.asarray(timed.generation.tokens), np.asarray(plain.generation.tokens)
    is_new = np.arange(own.shape[1]) < np.asarray(timed.generation.length)[:, None]
    return bool(np.all((own == other) | ~is_new))


def _row(group: Group, method: str, **values: Any) -> Row:
    where = {"size": group.size, "context": group.context, "batch": group.batch}
    return {"part": group.part, **where, "method": method, **values}


def _prompt(base: Base, group: Group):
    """Random tokens of one cycle, so that whatever the target says has occurred before."""
    numbers = np.random.default_rng(group.context)
    few = min(CYCLE, base.config.vocab_size)
    return from_ids(numbers.integers(0, few, (group.batch, group.context)).tolist())


def _bytes(base: Base, group: Group, new_tokens: int) -> float:
    target = LoadedTarget(base.model, base.params, None, base.config, group.size)
    return bytes_per_pass(target, group.context + new_tokens / 2, group.batch)


def plan(
    parts: Sequence[str],
    sizes: Sequence[str],
    size: str,
    methods: Sequence[str],
    context: int,
    contexts: Sequence[int],
    batches: Sequence[int],
    at_once: int,
) -> list[Group]:
    """All groups, the most wanted first; `at_once` methods are compiled together."""
    two = tuple(name for name in ("eagle2", "pld") if name in methods)
    groups = {
        "bandwidth": [Group("bandwidth")],
        "plain": [Group("plain", each, context) for each in sizes],
        "rounds": [
            Group("rounds", size, context, 1, tuple(methods[at : at + at_once]))
            for at in range(0, len(methods), at_once)
        ],
        "batch": [Group("batch", size, context, each, two) for each in batches],
        "context": [Group("context", size, each, 1, two) for each in contexts],
    }
    return [group for part in PARTS if part in parts for group in groups[part]]
