"""Our methods as contestants of a measurement."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.bench.measure import PLAIN, Contestant, Program, Request, Text, compilations
from specjax.bench.options import BenchOptions, methods_in, names_in, sampling_of, sources_in
from specjax.bench.peers import peers
from specjax.bench.results import Stage
from specjax.decoding.drafter import Drafter, Params
from specjax.decoding.generate import finish_loop, start_loop
from specjax.decoding.prompt import Prompt, from_ids, padded_length
from specjax.decoding.sampling import Sampling
from specjax.decoding.state import Generation, LoopState
from specjax.hub import POCKET, LoadedTarget
from specjax.loading import load_draft, load_drafter
from specjax.models.fingerprint import params_fingerprint

Prepared = tuple[Prompt, jax.Array]


@dataclass(frozen=True, eq=False)
class OwnMethod:
    """A drafting method of ours as a contestant."""

    name: str
    target: LoadedTarget
    drafter: Drafter
    params: Params
    sampling: Sampling
    max_new_tokens: int
    padded_length: int  # the one length of all prompts, so that one program serves them all
    seed: int = 0

    most_rows = None
    has_prefill = True

    @property
    def settings(self) -> str:
        """What is measured: the drafter's fields, and a checksum of its weights."""
        return f"{self.drafter!r} {params_fingerprint(self.params.drafter)}"

    @property
    def dtype(self) -> str:
        """Of the target's weights."""
        return str(self.target.dtype)

    def prepare(self, rows: Sequence[Sequence[int]]) -> Prepared:
        """The padded prompts and the key, on the device."""
        prompt = from_ids(rows, bucket=self.padded_length), jax.random.key(self.seed)
        return jax.block_until_ready(prompt)

    def compile(self, prepared: Prepared) -> Program:
        """Compiles prefill and rounds; the calls that follow use the same programs."""
        started = time.perf_counter()
        prefill = _compiled(start_loop.lower(self.params, *prepared, **self._settings()))
        state = jax.eval_shape(lambda: start_loop(self.params, *prepared, **self._settings()))
        rounds = _compiled(
            finish_loop.lower(
                self.params, state, self.max_new_tokens, **self._settings(), **self._drawing()
            )
        )
        seconds = time.perf_counter() - started
        peak_bytes = max(prefill.peak_bytes, rounds.peak_bytes)
        return Program(seconds, prefill.is_cached or rounds.is_cached, peak_bytes)

    def start(self, prepared: Prepared) -> LoopState:
        """The state before the first round."""
        return jax.block_until_ready(start_loop(self.params, *prepared, **self._settings()))

    def finish(self, state: LoopState) -> Generation:
        """The new texts, finished."""
        _, generation = finish_loop(
            self.params, state, self.max_new_tokens, **self._settings(), **self._drawing()
        )
        return jax.block_until_ready(generation)

    def read(self, result: Generation) -> tuple[Text, ...]:
        """The texts, their rounds, and how their tokens came."""
        found = jax.device_get(result)
        return tuple(_text(found, row) for row in range(len(found.length)))

    def _settings(self) -> dict[str, Any]:
        return {
            "target": self.target.model,
            "drafter": self.drafter,
            "max_new_tokens": self.max_new_tokens,
        }

    def _drawing(self) -> dict[str, Any]:
        return {"sampling": self.sampling, "eos": self.target.eos}


def make_contestants(
    target: LoadedTarget, options: BenchOptions, requests: Sequence[Request], stage: Stage
) -> list[Contestant]:
    """Plain decoding, the other methods in the order they are named, then peers.

    Raises:
        SpecjaxError: for an unknown method, or one that cannot be had for this target.
    """
    sampling = sampling_of(options, stage.temperature)
    sources = sources_in(options.drafter)
    longest = padded_length([request.ids for request in requests])
    named = methods_in(options.methods, target.config, target.name == POCKET)
    made: list[Contestant] = []
    for name in dict.fromkeys([PLAIN, *named, *sources]):
        drafter, params = load_drafter(name, target, sources.get(name))
        settings = sampling, options.max_new_tokens, longest, options.seed
        made.append(OwnMethod(name, target, drafter, Params(target.params, params), *settings))
    if names_in(options.peers) and stage.temperature == 0:
        has_draft = target.name == POCKET or "draft-model" in sources
        draft = load_draft(target, sources.get("draft-model")) if has_draft else None
        others = peers(target, options.max_new_tokens, draft)
        made += [each for each in others if stage.num_rows <= (each.most_rows or stage.num_rows)]
    return made


def _text(found: Generation, row: int) -> Text:
    length = int(found.length[row])
    return Text(
        tokens=tuple(np.asarray(found.tokens)[row, :length].tolist()),
        rounds=int(found.stats.rounds[row]),
        accepted_lengths=tuple(np.asarray(found.stats.accepted_lengths)[row].tolist()),
        from_draft=tuple(np.asarray(found.from_draft)[row, :length].tolist()),
    )


class _Compiled(NamedTuple):
    is_cached: bool  # this process had compiled it before, or an earlier one
    peak_bytes: int  # it holds at once: what it is given, returns and needs between


def _compiled(lowered: Any) -> _Compiled:
    num_compiled, num_cached = compilations().num_compiled, compilations().num_cached
    held = lowered.compile().memory_analysis()
    is_known = compilations().num_compiled == num_compiled
    return _Compiled(
        is_known or compilations().num_cached > num_cached,
        held.argument_size_in_bytes
        + held.output_size_in_bytes
        - held.alias_size_in_bytes
        + held.temp_size_in_bytes,
    )
