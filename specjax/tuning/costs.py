"""What a pass of the target costs by its rows on this device, and at which widths it should run.

A round takes a pass over the root and the drafted tokens. Every width that it may run at is one
more program to compile, so a few are chosen, and a draft waits for the next that fits.
"""

import time
from collections.abc import Sequence
from functools import partial
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from specjax.hub import LoadedTarget
from specjax.models.cache import KVCache
from specjax.models.pass_costs import RowCosts
from specjax.models.target import Taps, Target, causal_rows

WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
WIDE = (96, 128)  # where many rows cost as little as one
NUM_PASSES, NUM_REPEATS = 8, 9
MOST_WIDTHS = 5  # that a program is compiled for
LEAST_SAVING = 0.02  # of the target's passes; a width that saves less is not worth its program


def measure_row_costs(
    target: LoadedTarget, text_length: int, num_slots: int, widths: Sequence[int] | None = None
) -> RowCosts:
    """Runs passes of all widths in turn; each cost is the median over what the turns say.

    Args:
        target: whose passes they are.
        text_length: tokens in the cache.
        num_slots: of the cache, by which attention costs; they must hold the text and the rows.
        widths: rows of a pass, from 1; by default `WIDTHS`, with `WIDE` on other devices than CPU.
    """
    if widths is None:
        widths = WIDTHS if jax.default_backend() == "cpu" else (*WIDTHS, *WIDE)
        widths = [width for width in widths if text_length + width <= num_slots]
    cache = target.model.new_cache(target.params, 1, num_slots)
    cache = cache.advance(jnp.full(1, text_length, jnp.int32))
    tokens = {width: jnp.zeros((1, width), jnp.int32) for width in widths}
    ratios: list[list[float]] = []
    for repeat in range(1 + NUM_REPEATS):
        seconds = []
        for width in widths:
            given = jax.block_until_ready((tokens[width], cache))
            started = time.perf_counter()
            _, cache = jax.block_until_ready(
                _passes(target.params, *given, NUM_PASSES, target=target.model)
            )
            seconds.append(time.perf_counter() - started)
        if repeat:  # the first compiles
            ratios.append([each / seconds[0] for each in seconds])
    costs = np.maximum.accumulate(np.median(ratios, axis=0))  # more rows are never cheaper
    return RowCosts(tuple(widths), tuple(costs.tolist()))


@partial(jax.jit, static_argnames="target", donate_argnames="cache")
def _passes(
    params: Any,
    tokens: Int[Array, "1 W"],
    cache: KVCache,
    count: Int[Array, ""],
    *,
    target: Target,
) -> tuple[Int[Array, "1 W"], KVCache]:
    """So many passes, each over what the one before said, in one program as decoding runs them."""

    def one_pass(_, carry):
        tokens, cache = carry
        output, cache = target.run(params, causal_rows(tokens, cache.length), cache, Taps())
        assert output.logits is not None
        return jnp.argmax(output.logits, axis=-1).astype(jnp.int32), cache

    return lax.fori_loop(0, count, one_pass, (tokens, cache))


def choose_widths(costs: RowCosts, wanted: Sequence[int], num_nodes: int) -> tuple[int, ...]:
    """The widths that waste least on these rounds: 1, `num_nodes`, and few between.

    Each further width must save `LEAST_SAVING` of what the rounds' passes cost without it.

    Args:
        costs: of the target's passes.
        wanted: rows that each round would need, from 1 to `num_nodes`.
        num_nodes: rows that any draft may need.
    """
    ends = {1, num_nodes}
    between = [width for width in costs.widths if 1 < width < num_nodes]
    chosen, least = _least_waste(costs, wanted, [ends])
    for count in range(1, MOST_WIDTHS - len(ends) + 1):
        options = [ends.union(some) for some in combinations(between, count)]
        if not options:
            break
        widths, cost = _least_waste(costs, wanted, options)
        if cost < (1 - LEAST_SAVING) ** (len(widths) - len(chosen)) * least:
            chosen, least = widths, cost
    return chosen


def _least_waste(
    costs: RowCosts, wanted: Sequence[int], options: Sequence[set[int]]
) -> tuple[tuple[int, ...], float]:
    rows, times = np.unique(np.asarray(wanted), return_counts=True)

    def cost(option: set[int]) -> float:
        widths = np.sort(list(option))
        fitting = widths[np.searchsorted(widths, rows)]
        return float(np.dot(times, [costs.at(int(width)) for width in fitting]))

    found = min(options, key=cost)
    return tuple(sorted(found)), cost(found)
