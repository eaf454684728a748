"""`specjax bench`: measures methods on tasks and tells what they gain over plain decoding."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np

from specjax.bench.bandwidth import bytes_per_round, read_bandwidth
from specjax.bench.measure import (
    PLAIN,
    PREFILL,
    Answer,
    Contestant,
    Judge,
    Measurement,
    Request,
    exactly,
    measure,
    summarise,
    warm_up,
)
from specjax.bench.options import BenchOptions, methods_in, names_in, sources_in
from specjax.bench.peers import Transformers, check_peer
from specjax.bench.report import ALL, show, write
from specjax.bench.tasks import Task, read_tasks, token_ids
from specjax.bench.ties import NearTies
from specjax.decoding.drafter import Drafter, Params
from specjax.decoding.drafters import METHODS, check_settings
from specjax.decoding.generate import speculative_generate
from specjax.decoding.prompt import BUCKET, Prompt, from_ids
from specjax.decoding.request import check_length, check_prompt
from specjax.decoding.sampling import Sampling
from specjax.decoding.state import Generation
from specjax.drafting import load_drafter
from specjax.errors import SpecjaxError
from specjax.files import expand_user
from specjax.hub import Target
from specjax.models.config import LlamaConfig


@dataclass(frozen=True, eq=False)
class OwnMethod:
    """A drafting method of ours as a contestant."""

    name: str
    target: Target
    drafter: Drafter
    params: Params
    sampling: Sampling
    max_new_tokens: int
    padded_length: int  # the one length of all prompts, so that one program serves them all
    seed: int

    @property
    def dtype(self) -> str:
        """Of the target's weights."""
        return str(self.target.params["embed_tokens"]["weight"].dtype)

    def prepare(self, ids: Sequence[int]) -> tuple[Prompt, jax.Array]:
        """The padded prompt and the key, on the device."""
        prompt = from_ids([ids], bucket=self.padded_length), jax.random.key(self.seed)
        return jax.block_until_ready(prompt)

    def run(self, request: tuple[Prompt, jax.Array]) -> Generation:
        """The new text, finished."""
        generation = speculative_generate(
            self.params,
            *request,
            target=self.target.model,
            drafter=self.drafter,
            sampling=self.sampling,
            max_new_tokens=self.max_new_tokens,
            eos=self.target.eos,
        )
        return jax.block_until_ready(generation)

    def read(self, result: Generation) -> Answer:
        """Its tokens and rounds."""
        tokens = np.asarray(result.tokens)[0, : int(result.length[0])]
        return Answer(tuple(tokens.tolist()), int(result.stats.rounds[0]))


def run_bench(load_target: Callable[[], Target], options: BenchOptions) -> list[Measurement]:
    """Measures, prints a table, and returns its rows: per kind of task, then over all of them.

    When it is interrupted, the rows that are complete are printed, and have been written.

    Args:
        load_target: calls `specjax.load`, once all that needs no target has been checked.
        options: what to measure.

    Raises:
        SpecjaxError: before anything is measured, for options, tasks or methods that cannot be
            served.
    """
    _check(options)
    with _opened(options.out) as out:
        tasks = read_tasks(options.tasks, options.limit, options.seed)
        target = load_target()
        requests = _requests(tasks, target, options.max_new_tokens)
        contestants = make_contestants(target, options, requests)
        sampling = sampling_of(options)
        judge = NearTies(target, sampling, options.seed, options.max_new_tokens)
        bandwidth, about, rows = read_bandwidth(), _about(target, options), []
        try:
            for row in compare(contestants, requests, options.runs, judge):
                rows.append(_with_bandwidth_share(row, target, bandwidth))
                if out:
                    write(rows[-1], out, about)
        finally:
            if rows:
                show(rows, options.runs, bandwidth, sampling)
    return rows


def compare(
    contestants: Sequence[Contestant],
    requests: Sequence[Request],
    num_runs: int,
    judge: Judge = exactly,
) -> Iterator[Measurement]:
    """One Measurement per kind and contestant, as they come, then over all kinds.

    Requests of one kind stand together, and plain decoding is among the contestants.
    """
    compile_seconds = warm_up(contestants, requests[0].ids)
    samples, num_done, num_kinds = [], 0, 0
    for kind, group in groupby(requests, key=lambda request: request.kind):
        of_kind = list(group)
        fresh = [
            sample._replace(number=num_done + sample.number)
            for sample in measure(contestants, of_kind, num_runs)
        ]
        samples += fresh
        num_done += len(of_kind)
        num_kinds += 1
        yield from summarise(kind, fresh, compile_seconds, judge)
    if num_kinds > 1:
        yield from summarise(ALL, samples, compile_seconds, judge)


def make_contestants(
    target: Target, options: BenchOptions, requests: Sequence[Request]
) -> list[Contestant]:
    """Plain decoding, the other methods in the order they are named, then peers.

    Raises:
        SpecjaxError: for an unknown method, or one that cannot be had for this target.
    """
    longest = max(len(request.ids) for request in requests)
    padded_length = -(-longest // BUCKET) * BUCKET
    sampling = sampling_of(options)
    sources = sources_in(options.drafter)

    def method(name: str, title: str, max_new_tokens: int) -> Contestant:
        drafter, params = load_drafter(name, target, sources.get(name))
        settings = sampling, max_new_tokens, padded_length, options.seed
        return OwnMethod(title, target, drafter, Params(target.params, params), *settings)

    named = methods_in(options.methods, target.config)
    names = dict.fromkeys([PLAIN, *named, *sources])
    contestants = [method(name, name, options.max_new_tokens) for name in names]
    contestants.append(method(PLAIN, PREFILL, max_new_tokens=1))
    if names_in(options.peers):
        peer = Transformers(target.config, target.params, target.eos, options.max_new_tokens)
        contestants.append(peer)
    return contestants


def sampling_of(options: BenchOptions) -> Sampling:
    """How tokens are drawn and accepted.

    Raises:
        SpecjaxError: for a bad temperature.
    """
    return Sampling(options.temperature, verification=options.verification)


def _check(options: BenchOptions) -> None:
    """Raises SpecjaxError for what cannot be served whatever the target is."""
    for name in ("runs", "limit", "max_new_tokens"):
        if getattr(options, name) < 1:
            raise SpecjaxError(
                f"{name} {getattr(options, name)} must be at least 1: nothing would be measured"
            )
    sampling_of(options)
    for name in names_in(options.methods):
        check_settings(name, {})
    if options.peers and options.temperature > 0:
        raise SpecjaxError(
            "peers draw with noise of their own, so texts differ; use temperature 0 with peers"
        )
    for name in names_in(options.peers):
        check_peer(name)
    sources_in(options.drafter)


def _requests(tasks: Sequence[Task], target: Target, max_new_tokens: int) -> list[Request]:
    """The prompts in tokens.

    Raises:
        SpecjaxError: for a target without a tokenizer, or a prompt that it cannot continue.
    """
    tokenizer = target.require_tokenizer()
    requests = [Request(task.kind, token_ids(task, tokenizer)) for task in tasks]
    for kind, group in groupby(requests, key=lambda request: request.kind):
        check_prompts(kind, [request.ids for request in group], target.config, max_new_tokens)
    return requests


def check_prompts(
    kind: str, rows: Sequence[Sequence[int]], config: LlamaConfig, max_new_tokens: int
) -> None:
    """Raises SpecjaxError, with kind and number (from 0), for a prompt that cannot be served."""
    try:
        prompt = from_ids(rows)
        check_prompt(np.asarray(prompt.tokens), np.asarray(prompt.length), config)
    except SpecjaxError as error:
        raise SpecjaxError(f"{kind} {error}") from None
    for number, ids in enumerate(rows):
        try:
            check_length(len(ids), max_new_tokens, config)
        except SpecjaxError as error:
            raise SpecjaxError(f"{kind} prompt {number}: {error}, or leave it out") from None


def _with_bandwidth_share(row: Measurement, target: Target, bandwidth: float) -> Measurement:
    if row.method not in METHODS:  # a peer has weights of its own, and may run elsewhere
        return row
    num_bytes = bytes_per_round(target, row.mean_length) * row.rounds
    return replace(row, bandwidth_share=num_bytes / row.seconds / bandwidth)


def _opened(path: Path | None) -> AbstractContextManager[TextIO | None]:
    if path is None:
        return nullcontext()
    try:
        return expand_user(path).open("a", encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise SpecjaxError(f"--out {path} cannot be written ({reason}); check the path") from None


def _about(target: Target, options: BenchOptions) -> dict[str, Any]:
    """What every row of a file says about how it was measured."""
    device = jax.devices()[0]
    return {
        "target": target.name,
        "device": device.device_kind,
        "tasks": options.tasks,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "verification": options.verification,
        "is_lossy": sampling_of(options).is_lossy,
        "runs": options.runs,
        "seed": options.seed,
        "jax": jax.__version__,
    }
