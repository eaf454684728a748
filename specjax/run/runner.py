"""Runs one method on one target: compiles it, warms it up, and times prefill and decoding."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.stages import Lowered
from jaxtyping import Array, Key

from specjax.decoding.drafter import Params
from specjax.decoding.engine import Engine
from specjax.decoding.generate import ROUNDS_PER_CALL, stream_states
from specjax.decoding.prompt import Prompt, from_ids
from specjax.decoding.state import Generation, LoopState
from specjax.models.fingerprint import params_fingerprint
from specjax.models.quantize import dtype_name

COMPILED = "/jax/core/compile/backend_compile_duration"
FROM_CACHE = "/jax/compilation_cache/cache_hits"

Trial = tuple[int, int]  # the number of a batch and of its repeat; each trial has its own noise
Prepared = tuple[Prompt, Key[Array, ""]]  # padded prompts on the device, and their key


class Program(NamedTuple):
    """The seconds it took to compile a method's programs, and the memory they need."""

    compile_seconds: float = 0.0
    is_cached: bool = False  # at least a part came from a cache of compiled programs
    peak_bytes: int | None = None  # arguments, results and temporaries together


class GeneratedText(NamedTuple):
    """The continuation of one prompt."""

    tokens: tuple[int, ...]
    rounds: int  # passes of the target, prefill not counted
    accepted_lengths: tuple[int, ...] = ()  # entry n: rounds that committed n tokens
    from_draft: tuple[bool, ...] = ()  # which tokens were drafted
    accepted: int | None = None  # drafted tokens, including those cut off the text; None: unknown

    @property
    def num_accepted(self) -> int:
        """Drafted tokens that were accepted; if unknown, all but one token of each round."""
        return len(self.tokens) - self.rounds if self.accepted is None else self.accepted


class TimedRun(NamedTuple):
    """A finished generation, the state it ended in, and the seconds of its two parts."""

    generation: Generation
    state: LoopState
    prefill_seconds: float
    decode_seconds: float

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds


@dataclass(frozen=True, eq=False)
class Runner:
    """A method with its target, its params, and the length that all prompts are padded to."""

    name: str
    engine: Engine
    params: Params
    padded_length: int  # the same for all prompts, so that one program serves them all
    seed: int = 0

    has_prefill = True  # `prefill` is timed separately

    @property
    def dtype(self) -> str:
        return dtype_name(self.engine.target.dtype(self.params.target), self.params.target)

    @property
    def settings(self) -> str:
        """The drafter's fields and a checksum of its weights, which determine its figures."""
        return f"{self.engine.drafter!r} {params_fingerprint(self.params.drafter)}"

    # ---- Before timing --------------------------------------------------------------------------

    def prepare(self, sequences: Sequence[Sequence[int]], trial: Trial = (0, 0)) -> Prepared:
        """Pads prompts and moves them, with the key of their trial, to the device."""
        prompt = from_ids(sequences, bucket=self.padded_length)
        return jax.block_until_ready((prompt, trial_key(self.seed, trial)))

    def compile(self, prepared: Prepared) -> Program:
        """Compiles the programs for prompts of this shape and loads all of their code."""
        started = time.perf_counter()
        programs = [_compiled(lowered) for lowered in self.engine.lower(self.params, *prepared)]
        seconds = time.perf_counter() - started
        self.engine.warm_up(self.params, *prepared)
        peaks = [program.peak_bytes for program in programs if program.peak_bytes is not None]
        is_cached = any(program.is_cached for program in programs)
        return Program(seconds, is_cached, max(peaks, default=None))

    # ---- Timed ----------------------------------------------------------------------------------

    def prefill(self, prepared: Prepared) -> LoopState:
        """Prefills, and returns when the state is ready."""
        return jax.block_until_ready(self.engine.prefill(self.params, *prepared))

    def decode(self, state: LoopState) -> tuple[Generation, LoopState]:
        """Decodes to the end, and returns when the result is ready. The state is donated."""
        state = self.engine.run(self.params, state, self.engine.max_new_tokens)
        return jax.block_until_ready(self.engine.generation(state)), state

    def run(
        self,
        prepared: Prepared,
        begin: Callable[[], LoopState] | None = None,
        show: Callable[[Generation], None] | None = None,
        is_over: Callable[[Generation], bool] | None = None,
    ) -> TimedRun:
        """Prefills and decodes, and times both.

        `begin` replaces the prefill, as in a later turn of a conversation. `show` and `is_over` are
        called with the generation every few rounds, which is not timed; `is_over` ends it early.
        """
        started = time.perf_counter()
        state = jax.block_until_ready(begin()) if begin else self.prefill(prepared)
        prefill_seconds = time.perf_counter() - started
        is_watched = show is not None or is_over is not None
        rounds_per_call = ROUNDS_PER_CALL if is_watched else self.engine.max_new_tokens
        parts = stream_states(self.engine, self.params, state, rounds_per_call)
        decode_seconds = 0.0
        while True:
            started = time.perf_counter()
            generation, state = next(parts)
            decode_seconds += time.perf_counter() - started
            if show is not None:
                show(generation)
            if np.asarray(state.is_done).all() or (is_over is not None and is_over(generation)):
                return TimedRun(generation, state, prefill_seconds, decode_seconds)

    # ---- After timing ---------------------------------------------------------------------------

    def read(self, result: tuple[Generation, LoopState]) -> tuple[GeneratedText, ...]:
        generation, _ = result
        generation.check()
        generation = jax.device_get(generation)
        return tuple(_text(generation, sequence) for sequence in range(len(generation.length)))

    def num_drafting_rounds(self, prepared: Prepared) -> int:
        """Counts the rounds of a single sequence that draft anything."""
        rounds = stream_states(self.engine, self.params, self.prefill(prepared), rounds_per_call=1)
        return len({int(state.stats.drafted[0]) for _, state in rounds} - {0})


def trial_key(seed: int, trial: Trial) -> Key[Array, ""]:
    """Returns the key of a trial, which all methods share."""
    number, repeat = trial
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), repeat)


@cache
def compilations() -> Counter:
    """Returns the events of this process: `COMPILED` and `FROM_CACHE`, which counts as both."""
    counts = Counter()

    def listen(event: str, *_: Any, **__: Any) -> None:
        counts[event] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.monitoring.register_event_listener(listen)
    return counts


def _compiled(lowered: Lowered) -> Program:
    """Compiles a program; one that this process has compiled before counts as cached."""
    before = compilations().copy()
    memory = lowered.compile().memory_analysis()
    now = compilations()
    is_cached = now[COMPILED] == before[COMPILED] or now[FROM_CACHE] > before[FROM_CACHE]
    if memory is None:
        return Program(is_cached=is_cached)
    num_bytes = memory.argument_size_in_bytes + memory.output_size_in_bytes
    num_bytes += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    return Program(is_cached=is_cached, peak_bytes=num_bytes)


def _text(generation: Generation, sequence: int) -> GeneratedText:
    length = int(generation.length[sequence])
    stats = generation.stats
    return GeneratedText(
        tokens=tuple(generation.tokens[sequence, :length].tolist()),
        rounds=int(stats.rounds[sequence]),
        accepted_lengths=tuple(stats.accepted_lengths[sequence].tolist()),
        from_draft=tuple(generation.from_draft[sequence, :length].tolist()),
        accepted=int(stats.accepted[sequence]),
    )
