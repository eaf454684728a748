"""Decodes for long in one process: python -m benchmarks.soak

Several threads share the programs of several methods; single greedy texts and drawn batches follow
one another at random, some under all controls. Every text must be that of plain decoding. The
memory of the process after the warm-up, in which each thread runs each program, is compared with
that at the end.
"""

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.harness import at_least_1, main, requests_for, table
from specjax import (
    LoadedTarget,
    Params,
    Sampling,
    SpecjaxError,
    from_ids,
    load,
    load_drafter,
    speculative_generate,
)
from specjax.bench.measure import PLAIN
from specjax.bench.options import names_in
from specjax.core.errors import throttled
from specjax.decoding.prompt import padded_length

METHODS = "pld,pld-plus,lookahead,recycling,rest,draft-model,medusa,eagle2,auto"
MAX_GROWTH = 0.05
NUM_SAMPLES = 20  # of the memory
CONTROLLED = Sampling(
    0.8,
    top_p=0.95,
    min_p=0.02,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias=((5, 2.0), (9, -3.0)),
    bad_words=((7,), (11, 12)),
    min_new_tokens=8,
    logprobs=2,
)


@dataclass(frozen=True)
class SoakOptions:
    """The options of this benchmark."""

    target: str = "pocket"  # pocket, a folder in Hugging Face format, or a hub id
    methods: str = METHODS  # methods, with commas between
    generations: int = 2000  # texts or batches to generate
    threads: int = 4  # threads that share them
    batch: int = 3  # sequences of every third request
    prompts: int = 8  # prompts of each kind of task
    max_new_tokens: int = 48  # new tokens per sequence
    seed: int = 0  # seed of the order, the prompts and the noise


class Work(NamedTuple):
    """One request, without its method: plain decoding's tokens belong to it."""

    first: int  # prompt of a batch; the others follow it
    num_sequences: int
    sampling: Sampling
    seed: int


class Memory(NamedTuple):
    """The memory of the process, in bytes and in memory maps."""

    resident: int
    maps: int

    @classmethod
    def now(cls) -> "Memory":
        """Asks Linux."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        maps = Path("/proc/self/maps").read_bytes().count(b"\n")
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), maps)


@dataclass(frozen=True, eq=False)
class Soak:
    """The programs and their requests."""

    target: LoadedTarget
    options: SoakOptions
    drafters: dict[str, Any]  # with their params
    prompts: list[tuple[int, ...]]

    def tokens(self, method: str, work: Work) -> np.ndarray:
        """Decodes one request."""
        drafter, params = self.drafters[method]
        chosen = range(work.first, work.first + work.num_sequences)
        ids = [self.prompts[at % len(self.prompts)] for at in chosen]
        generation = speculative_generate(
            Params(self.target.params, params),
            from_ids(ids, padded_length(self.prompts)),
            jax.random.key(work.seed),
            target=self.target.model,
            drafter=drafter,
            sampling=work.sampling,
            max_new_tokens=self.options.max_new_tokens,
            eos=self.target.eos,
        )
        generation.check()
        return np.asarray(generation.tokens)

    @property
    def shapes(self) -> tuple[tuple[int, Sampling], ...]:
        """Sequences and sampling: greedy texts, sampled batches, and texts under all controls."""
        return (1, Sampling()), (self.options.batch, Sampling(0.8)), (1, CONTROLLED)


def soak(options: SoakOptions) -> None:
    """Runs, and prints a table."""
    at_least_1(options, "generations", "threads", "batch", "prompts", "max_new_tokens")
    target = load(options.target)
    names = [PLAIN, *names_in(options.methods)]
    requests = requests_for(target, "pocket", options.prompts, options.max_new_tokens)
    drafters = {name: load_drafter(name, target) for name in names}
    run = Soak(target, options, drafters, [request.ids for request in requests])
    warm_up = [(name, Work(0, *shape, 0)) for name in names for shape in run.shapes]
    with ThreadPoolExecutor(options.threads) as pool:
        for _ in range(2):
            list(pool.map(lambda each: run.tokens(*each), warm_up))
        draw, note = random.Random(options.seed), throttled()
        works = [
            Work(draw.randrange(len(requests)), *shape, draw.randrange(4))
            for shape in run.shapes
            for _ in range(32)
        ]
        plain = pool.map(lambda work: run.tokens(PLAIN, work), works)
        expected = dict(zip(works, plain, strict=True))
        todo = [(draw.choice(names[1:]), draw.choice(works)) for _ in range(options.generations)]
        samples, wrong, started = [Memory.now()], [], time.perf_counter()
        step = max(1, options.generations // NUM_SAMPLES)
        for at in range(0, len(todo), step):
            part = todo[at : at + step]
            results = pool.map(lambda each: run.tokens(*each), part)
            wrong += [
                each
                for each, tokens in zip(part, results, strict=True)
                if not np.array_equal(tokens, expected[each[1]])
            ]
            samples.append(Memory.now())
            note(f"{at + len(part)} of {len(todo)} generations")
    seconds = time.perf_counter() - started
    print(report(todo, wrong, samples, seconds))
    if wrong:
        raise SpecjaxError(f"{len(wrong)} texts differ from plain decoding's, first {wrong[0]}")
    for name, first, last in zip(Memory._fields, samples[0], samples[-1], strict=True):
        if last > first * (1 + MAX_GROWTH):
            raise SpecjaxError(f"{name} memory grew from {first} to {last}; look for a leak")


def report(todo: list, wrong: list, samples: list[Memory], seconds: float) -> str:
    """Returns a table of the texts and the memory."""
    first, last = samples[0], samples[-1]
    most = max(each.resident for each in samples)
    rows = [
        ("generations", len(todo)),
        ("methods", len({method for method, _ in todo})),
        ("texts unlike plain decoding's", len(wrong)),
        ("seconds", f"{seconds:.0f}"),
        ("resident after the warm-up", f"{first.resident / 2**20:.0f} MiB"),
        ("resident at the end", f"{last.resident / 2**20:.0f} MiB"),
        ("most meanwhile", f"{most / 2**20:.0f} MiB"),
        ("memory maps after the warm-up", first.maps),
        ("memory maps at the end", last.maps),
    ]
    return table(("", "result"), rows)


if __name__ == "__main__":
    main(soak, SoakOptions, __doc__)
