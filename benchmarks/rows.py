"""Measures the cost of a pass by its width: python -m benchmarks.rows TARGET

For one row and for more, behind each length of cache: the time of a pass over that of a single row,
and over the time in which this machine reads the pass's bytes, weights and cache, once.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array
from tyro.conf import Positional

from benchmarks.harness import at_least_1, main, table
from specjax import LoadedTarget, SpecjaxError, load
from specjax.bench.bandwidth import bytes_per_pass, read_bandwidth
from specjax.models import causal_rows

HEADER = ("slots", "rows", "ms", "x one row", "x floor")


@dataclass(frozen=True)
class RowsOptions:
    """The options of this benchmark."""

    target: Positional[str]  # pocket, a folder in Hugging Face format, or a hub id
    dtype: str = ""  # the dtype; by default the fastest here
    rows: tuple[int, ...] = (8, 16, 64)  # rows of a pass; one row is always measured
    slots: tuple[int, ...] = (640,)  # lengths of the cache
    passes: int = 64  # passes of a run, one after the other
    repeats: int = 7  # timed runs of each, in turn
    quantize: str = ""  # int8 or int4


def passes(target: LoadedTarget, num_rows: int, num_slots: int, count: int) -> Callable[[], Array]:
    """Returns a program of `count` passes over the last rows of the cache.

    Each pass reads the token that the one before found, so that none can be left out.
    """
    model = target.model

    @jax.jit
    def run(params):
        cache = model.new_cache(params, 1, num_slots)
        cache = replace(cache, length=jnp.full_like(cache.length, num_slots - num_rows))

        def step(_, carry):
            cache, token = carry
            tokens = jnp.broadcast_to(token[:, None], (1, num_rows))
            output, cache = model.run(params, causal_rows(tokens, cache.length), cache)
            assert output.logits is not None
            return cache, jnp.argmax(output.logits[:, -1], axis=-1)

        return lax.fori_loop(0, count, step, (cache, jnp.zeros(1, jnp.int32)))[1]

    return partial(run, target.params)


def pass_seconds(
    target: LoadedTarget, widths: Sequence[int], num_slots: int, count: int, repeats: int
) -> dict[int, float]:
    """Returns the median seconds of a pass of each width, timed in turn, `count` passes a run."""
    programs = {rows: passes(target, rows, num_slots, count) for rows in widths}
    seconds: dict[int, list[float]] = {rows: [] for rows in widths}
    for _ in range(1 + repeats):  # the first compiles
        for rows, program in programs.items():
            started = time.perf_counter()
            jax.block_until_ready(program())
            seconds[rows].append(time.perf_counter() - started)
    return {rows: median(timed[1:]) / count for rows, timed in seconds.items()}


def run(options: RowsOptions) -> None:
    """Measures and prints the table."""
    at_least_1(options, "passes", "repeats")
    widths = sorted({1, *options.rows})
    if widths[0] < 1 or widths[-1] >= min(options.slots, default=0):
        raise SpecjaxError(f"rows {widths} must be at least 1, and less than slots {options.slots}")
    target = load(options.target, options.dtype or None, quantize=options.quantize or None)
    bandwidth, lines = read_bandwidth(), []
    for num_slots in options.slots:
        seconds = pass_seconds(target, widths, num_slots, options.passes, options.repeats)
        floor = bytes_per_pass(target, float(num_slots)) / bandwidth
        for rows, pass_time in seconds.items():
            ratios = pass_time / seconds[1], pass_time / floor
            figures = f"{1e3 * pass_time:.1f}", *(f"{ratio:.2f}" for ratio in ratios)
            lines.append((str(num_slots), str(rows), *figures))
    print(table(HEADER, lines))
    weights = options.quantize or target.dtype_name
    print(f"{weights} on {jax.devices()[0].device_kind}, which reads {bandwidth / 1e9:.0f} GB/s")


if __name__ == "__main__":
    main(run, RowsOptions, __doc__)
