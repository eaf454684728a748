"""Counts which nodes of a tree of recycled tokens are right, and prints the best trees.

    python -m recipes.smollm2.recycling --target TARGET --data FOLDER_OF_PROMPTS

The target answers questions that the benchmark does not ask, with a tree of `WIDE` nodes, and one
table serves all of them. The order
printed is `BEST_FIRST` of `specjax.decoding.drafters.recycling`: the first n of it, with the root,
are the tree of n + 1 nodes that was right most often.
"""

import random
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import prod
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import tyro

from benchmarks.harness import main
from recipes.smollm2.texts import questions_in
from specjax import from_ids, load
from specjax.cli.environment import use_compilation_cache
from specjax.core.chat import chat_ids
from specjax.decoding.drafters.recycling import Recycling
from specjax.decoding.state import LoopState
from specjax.loading.targets import LoadedTarget
from specjax.run.engines import make_engine

Ranks = tuple[int, ...]  # a path
WIDE, LONGEST = 96, 256  # nodes of the tree, tokens of a prompt
NUM_RANKS = Recycling.num_successors
SIZE = 63  # of the largest tree, without its root
PRIOR = 50  # rounds that the guess counts for


@dataclass(frozen=True)
class Wide(Recycling):
    """Drafts a tree wide enough to find the nodes worth drafting."""

    @property
    def choices(self) -> tuple[Ranks, ...]:
        return tuple(best_first(guess, WIDE - 1, NUM_RANKS))


def guess(path: Ranks) -> float:
    """Returns a guess at the probability of a path, from which `Wide` is made."""
    return prod(0.4 / (rank + 1) ** 1.5 for rank in path)


def best_first(value: Callable[[Ranks], float], count: int, num_ranks: int) -> Iterator[Ranks]:
    """Yields the paths of most value, each after its parent and its better sibling."""
    heap: list[tuple[float, Ranks]] = [(-value((0,)), (0,))]
    for _ in range(count):
        _, path = heappop(heap)
        yield path
        after = [(*path, 0)] + [(*path[:-1], path[-1] + 1)] * (path[-1] + 1 < num_ranks)
        for other in after:
            heappush(heap, (-value(other), other))


@dataclass(frozen=True)
class Options:
    """Count which nodes of a tree of recycled tokens are right."""

    target: str
    data: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    num_prompts: int = 16
    max_new_tokens: int = 64

    def run(self) -> None:
        """Prints the order, and the accepted length expected of some trees."""
        use_compilation_cache()
        target = load(self.target)
        asked = questions_in(self.data)
        random.Random(0).shuffle(asked)
        prompts = [chat_ids(target.tokenizer, conversation.turns[0].text) for conversation in asked]
        prompts = [ids for ids in prompts if len(ids) <= LONGEST][: self.num_prompts]
        hits = Counter(right_paths(target, prompts, self.max_new_tokens))
        rounds = hits[()]
        order = list(best_first(lambda path: rate(path, hits), SIZE, NUM_RANKS))
        print(textwrap.fill(" ".join("".join(map(str, path)) for path in order), 92))
        for size in (8, 16, 32, 64):
            length = 1 + sum(hits[path] for path in order[: size - 1]) / rounds
            print(f"{size} nodes: accepted length {length:.3f} in {rounds} rounds")
        parents = sum(hits[path] for path in hits if (*path, 0) in Wide().choices)
        ranks = Counter(dict.fromkeys(range(NUM_RANKS), 0))
        for path in filter(None, hits):
            ranks[path[-1]] += hits[path]
        print("right, by rank:", *(f"{ranks[rank] / parents:.3f}" for rank in range(NUM_RANKS)))


def rate(path: Ranks, hits: Counter[Ranks]) -> float:
    """Returns the share of rounds in which a path was right; the guess counts as `PRIOR` rounds."""
    return (hits[path] + PRIOR * guess(path)) / (hits[()] + PRIOR)


def right_paths(
    target: LoadedTarget, prompts: Iterable[Sequence[int]], max_new_tokens: int
) -> Iterator[Ranks]:
    """Yields the paths of all nodes that were accepted, that of the root being ()."""
    engine, params = make_engine(target, (Wide(), None), max_new_tokens)
    play, table = jax.jit(engine.round), None
    for prompt in prompts:
        state = engine.prefill(params, from_ids([prompt], LONGEST), jax.random.key(0))
        state = replace(state, drafter=state.drafter if table is None else table)
        while not state.is_done.all():
            after = play(params, state)
            yield from paths_of(state, after)
            state = after
        table = state.drafter


def paths_of(before: LoopState, after: LoopState) -> Iterator[Ranks]:
    """Yields the paths of the nodes that one round of one sequence accepted."""
    tokens, drafted = np.asarray(after.tokens[0]), np.asarray(after.from_draft[0])
    path: Ranks = ()
    yield path
    for at in range(int(before.length[0]), int(after.length[0])):
        if drafted[at]:
            successors = np.asarray(before.drafter.tokens[0, tokens[at - 1]])
            path = (*path, int(np.flatnonzero(successors == tokens[at])[0]))
            yield path


if __name__ == "__main__":
    main(Options.run, Options, __doc__)
