"""`specjax bench`: measures methods on tasks and tells what they gain over plain decoding."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

import jax
import numpy as np

from specjax.bench.measure import (
    PLAIN,
    PREFILL,
    Answer,
    Contestant,
    Measurement,
    Request,
    measure,
    summarise,
    warm_up,
)
from specjax.bench.options import BenchOptions
from specjax.bench.peers import PEERS, Transformers
from specjax.bench.report import ALL, show, write
from specjax.bench.tasks import read_tasks, token_ids
from specjax.decoding.drafter import Drafter, Params
from specjax.decoding.drafters import make_drafter
from specjax.decoding.generate import speculative_generate
from specjax.decoding.prompt import BUCKET, Prompt, from_ids
from specjax.decoding.sampling import Sampling
from specjax.decoding.state import Generation
from specjax.errors import SpecjaxError
from specjax.models.config import LlamaConfig
from specjax.models.llama import Llama

LoadDrafter = Callable[[str], tuple[Drafter, Any]]


@runtime_checkable
class Target(Protocol):
    """What is measured: what `specjax.load` returns."""

    @property
    def model(self) -> Llama: ...
    @property
    def params(self) -> Any: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def config(self) -> LlamaConfig: ...
    @property
    def name(self) -> str: ...
    @property
    def eos(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, eq=False)
class Method:
    """A drafting method of ours as a contestant."""

    name: str
    target: Target
    drafter: Drafter
    params: Params
    sampling: Sampling
    max_new_tokens: int
    padded_length: int  # the one length of all prompts, so that one program serves them all
    seed: int

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


def run_bench(
    target: Target, options: BenchOptions, load_drafter: LoadDrafter | None = None
) -> list[Measurement]:
    """Measures, prints a table, and returns its rows: per kind of task, then over all of them.

    Args:
        target: what `specjax.load` returned.
        options: what to measure.
        load_drafter: method name -> drafter and its params, as `specjax.load_drafter` gives for
            this target; by default only methods without params can be measured.

    Raises:
        SpecjaxError: for options, tasks or methods that cannot be served.
    """
    _check(options)
    if target.tokenizer is None:
        raise SpecjaxError(f"{target.name} has no tokenizer; tasks are text, so it needs one")
    requests = [
        Request(task.kind, token_ids(task, target.tokenizer))
        for task in read_tasks(options.tasks, options.limit, options.seed)
    ]
    contestants = make_contestants(target, options, requests, load_drafter)
    about = _about(target, options)
    with _opened(options.out) as out:
        rows = compare(contestants, requests, options.runs, out, about)
    show(rows, options.runs)
    return rows


def compare(
    contestants: Sequence[Contestant],
    requests: Sequence[Request],
    num_runs: int,
    out: TextIO | None = None,
    about: dict[str, Any] | None = None,
) -> list[Measurement]:
    """One Measurement per kind and contestant, then over all kinds; written to `out` as they come.

    Requests of one kind stand together, and plain decoding is among the contestants.
    """
    compile_seconds = warm_up(contestants, requests[0].ids)
    rows, samples, num_kinds = [], [], 0
    for kind, group in groupby(requests, key=lambda request: request.kind):
        of_kind = [
            sample._replace(number=sample.number + len(requests) * num_kinds)
            for sample in measure(contestants, list(group), num_runs)
        ]
        num_kinds += 1
        samples += of_kind
        rows += write(summarise(kind, of_kind, compile_seconds), out, about)
    if num_kinds > 1:
        rows += write(summarise(ALL, samples, compile_seconds), out, about)
    return rows


def make_contestants(
    target: Target,
    options: BenchOptions,
    requests: Sequence[Request],
    load_drafter: LoadDrafter | None = None,
) -> list[Contestant]:
    """Plain decoding, the other methods in the order they are named, then peers.

    Raises:
        SpecjaxError: for an unknown method or peer, or one that cannot be had here.
    """
    load = load_drafter or (lambda name: (make_drafter(name, target.config, {}), None))
    longest = max(len(request.ids) for request in requests)
    padded_length = -(-longest // BUCKET) * BUCKET
    sampling = Sampling(options.temperature)

    def method(name: str, title: str, max_new_tokens: int) -> Contestant:
        drafter, params = load(name)
        settings = sampling, max_new_tokens, padded_length, options.seed
        return Method(title, target, drafter, Params(target.params, params), *settings)

    names = dict.fromkeys([PLAIN, *_names(options.methods)])
    contestants = [method(name, name, options.max_new_tokens) for name in names]
    contestants.append(method(PLAIN, PREFILL, max_new_tokens=1))
    if _names(options.peers):
        peer = Transformers(target.config, target.params, target.eos, options.max_new_tokens)
        contestants.append(peer)
    return contestants


def _check(options: BenchOptions) -> None:
    if options.runs < 1:
        raise SpecjaxError(f"runs {options.runs} must be at least 1: nothing would be measured")
    for name in _names(options.peers):
        if name not in PEERS:
            raise SpecjaxError(f"peer {name!r} is unknown; choose {', '.join(PEERS)}")
    if options.peers and options.temperature > 0:
        raise SpecjaxError(
            "peers draw with noise of their own, so texts differ; use temperature 0 with peers"
        )


def _opened(path: Path | None) -> AbstractContextManager[TextIO | None]:
    if path is None:
        return nullcontext()
    try:
        return path.expanduser().open("a", encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise SpecjaxError(f"--out {path} cannot be written ({reason}); check the path") from None


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _about(target: Target, options: BenchOptions) -> dict[str, Any]:
    """What every row of a file says about how it was measured."""
    device = jax.devices()[0]
    return {
        "target": target.name,
        "dtype": str(target.params["embed_tokens"]["weight"].dtype),
        "device": device.device_kind,
        "tasks": options.tasks,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "runs": options.runs,
        "seed": options.seed,
        "jax": jax.__version__,
    }
