"""Our methods as contestants of a measurement."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.stages import Lowered

from specjax.bench.measure import (
    COMPILED,
    FROM_CACHE,
    PLAIN,
    Contestant,
    GeneratedText,
    Program,
    Request,
    Turn,
    compilations,
    turn_key,
)
from specjax.bench.options import (
    BenchOptions,
    methods_in,
    names_in,
    sampling_of,
    settings_in,
    sources_in,
)
from specjax.bench.peers import peers
from specjax.bench.peers.peer import Work
from specjax.bench.results import Stage
from specjax.decoding.drafter import Drafter, Params
from specjax.decoding.engine import Engine
from specjax.decoding.prompt import Prompt, from_ids, padded_length
from specjax.decoding.sampling import Sampling
from specjax.decoding.state import Generation, LoopState
from specjax.loading.drafters import load_draft, load_drafter
from specjax.loading.methods import METHODS
from specjax.loading.targets import POCKET, LoadedTarget
from specjax.models.fingerprint import params_fingerprint
from specjax.models.quantize import dtype_name


@dataclass(frozen=True, eq=False)
class OwnMethod(Contestant):
    """A drafting method of ours."""

    name: str
    engine: Engine
    params: Params
    padded_length: int  # one length for all prompts, so that one program serves them all
    seed: int = 0

    @classmethod
    def for_prompts(
        cls,
        name: str,
        target: LoadedTarget,
        drafter: Drafter,
        drafter_params: Any,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling = Sampling(),
        seed: int = 0,
    ) -> "OwnMethod":
        """Makes the contestant that continues these prompts of token ids."""
        engine = Engine(target.model, drafter, sampling, max_new_tokens, target.eos)
        params = Params(target.params, drafter_params)
        return cls(name, engine, params, padded_length(prompts), seed)

    @property
    def dtype(self) -> str:
        """The dtype of the target's weights and compute."""
        return dtype_name(self.engine.target.dtype(self.params.target), self.params.target)

    @property
    def settings(self) -> str:
        """The drafter's fields and a checksum of its weights: what decides its figures."""
        return f"{self.engine.drafter!r} {params_fingerprint(self.params.drafter)}"

    def prepare(
        self, rows: Sequence[Sequence[int]], turn: Turn = (0, 0)
    ) -> tuple[Prompt, jax.Array]:
        prompt = from_ids(rows, bucket=self.padded_length), turn_key(self.seed, turn)
        return jax.block_until_ready(prompt)

    def compile(self, prepared: tuple[Prompt, jax.Array]) -> Program:
        started = time.perf_counter()
        programs = [_compiled(each) for each in self.engine.lower(self.params, *prepared)]
        seconds = time.perf_counter() - started
        self.engine.warm_up(self.params, *prepared)
        return Program(
            seconds,
            any(each.is_cached for each in programs),
            max(each.peak_bytes or 0 for each in programs),
        )

    def start(self, prepared: tuple[Prompt, jax.Array]) -> LoopState:
        return jax.block_until_ready(self.engine.prefill(self.params, *prepared))

    def finish(self, state: LoopState) -> Generation:
        state = self.engine.run(self.params, state, self.engine.max_new_tokens)
        return jax.block_until_ready(self.engine.generation(state))

    def read(self, result: Generation) -> tuple[GeneratedText, ...]:
        result.check()
        found = jax.device_get(result)
        return tuple(_text(found, row) for row in range(len(found.length)))


def make_contestants(
    target: LoadedTarget, options: BenchOptions, requests: Sequence[Request], stage: Stage
) -> list[Contestant]:
    """Makes plain decoding, the other methods in the order they are named, then peers.

    Raises:
        SpecjaxError: for an unknown method, or one that this target cannot have.
    """
    sampling = sampling_of(options, stage.temperature)
    prompts = [request.ids for request in requests]
    named = methods_in(options.methods, target.model, target.name == POCKET)
    sources, given = sources_in(options.drafter, named), settings_in(options.set, named)
    made: list[Contestant] = []
    known: dict[Any, Any] = {}  # variants that read the same head share one copy
    for name in dict.fromkeys([PLAIN, *named, *sources, *given]):
        method = named.get(name, name)
        drafter, params = load_drafter(method, target, sources.get(name), **given.get(name, {}))
        if head := METHODS[method].head:
            source = sources.get(name, METHODS[method].part)
            params = known.setdefault((head.kind, source), params)
        shared = prompts, options.max_new_tokens, sampling, options.seed
        made.append(OwnMethod.for_prompts(name, target, drafter, params, *shared))
    if names_in(options.peers) and stage.temperature == 0:
        has_draft = target.name == POCKET or "draft-model" in sources
        draft = load_draft(target, sources.get("draft-model")) if has_draft else None
        longest = max(map(len, prompts))
        work = Work(target, draft, longest, options.max_new_tokens)
        made += peers(names_in(options.peers), work, stage.num_rows)
    return made


def _text(found: Generation, row: int) -> GeneratedText:
    length = int(found.length[row])
    return GeneratedText(
        tokens=tuple(np.asarray(found.tokens)[row, :length].tolist()),
        rounds=int(found.stats.rounds[row]),
        accepted_lengths=tuple(np.asarray(found.stats.accepted_lengths)[row].tolist()),
        from_draft=tuple(np.asarray(found.from_draft)[row, :length].tolist()),
        accepted=int(found.stats.accepted[row]),
    )


def _compiled(lowered: Lowered) -> Program:
    """Compiles a program; one that this process has compiled before counts as cached."""
    before = compilations().copy()
    held = lowered.compile().memory_analysis()
    now = compilations()
    is_cached = now[COMPILED] == before[COMPILED] or now[FROM_CACHE] > before[FROM_CACHE]
    if held is None:
        return Program(is_cached=is_cached)
    num_bytes = held.argument_size_in_bytes + held.output_size_in_bytes + held.temp_size_in_bytes
    return Program(is_cached=is_cached, peak_bytes=num_bytes - held.alias_size_in_bytes)
