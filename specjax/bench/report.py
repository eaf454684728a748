"""What a benchmark prints."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from specjax.bench.acceptance import advice, is_useless
from specjax.bench.summary import Measurement
from specjax.bench.ties import near_tie_in
from specjax.decoding.sampling import LOSSY, Sampling

TABLE_WIDTH = 130  # even where a terminal is narrower: no number is cut off


def show(
    measurements: Sequence[Measurement],
    num_runs: int,
    bandwidth: float | None,
    sampling: Sampling = Sampling(),
) -> None:
    """Prints the table, what its numbers mean, and in red whatever makes it worthless.

    The rows are of one temperature and size of batch; `bandwidth` is in bytes per second, if known.
    """
    width = max(Console().width, TABLE_WIDTH)
    console = Console(soft_wrap=True, markup=False, highlight=False, width=width)
    console.print(table(measurements, sampling))
    one_task = [row for row in measurements if row.task == measurements[0].task]
    compiling = sum(row.compile_seconds for row in one_task)
    from_cache = ", partly from a cache" if any(row.is_cached for row in one_task) else ""
    console.print(
        f"medians of {num_runs} runs in turn; prefill counts, compiling ({compiling:.1f} s"
        f"{from_cache}) does not; round: a round of decoding over a plain step; memory: all that a "
        "program holds at once, weights included; an idle machine tells more"
    )
    is_cached = any((row.bandwidth_share or 0) > 1 for row in measurements)
    if bandwidth is not None:
        console.print(
            "bandwidth: bytes that the target's passes must read per second, over the "
            f"{bandwidth / 1e9:.0f} GB/s that this device reads"
            + ("; beyond 100% caches hold them" if is_cached else "")
        )
    for line in near_ties(measurements):
        console.print(line)
    for line in complaints(measurements):
        console.print(line, style="bold red")
    if sampling.is_lossy:
        console.print(LOSSY, style="bold red")


def table(measurements: Sequence[Measurement], sampling: Sampling = Sampling()) -> Table:
    """One row per method under each kind of task.

    `x plain` and its quartiles come from pairs of runs, `spread` is that of runs of all prompts,
    `round` the round overhead, `bandwidth` the share of what the device can read, `prefill` its
    share of the seconds, `memory` in MB, and `same` tells whether the tokens are those of plain
    decoding, as far as `sampling` promises it.
    """
    first = measurements[0]
    served = "" if first.batch == 1 else f", {first.batch} at once"
    result = Table(f"T={first.temperature:g}{served}", box=None, pad_edge=False)
    titles = (
        "tokens/s, x plain, quartiles, spread, accepted, round, bandwidth, prefill, memory, "
        "tokens, same"
    )
    for title in titles.split(", "):
        result.add_column(title, justify="right")
    task = None
    for row in measurements:
        if row.task != task:
            result.add_row(row.task)
            task = row.task
        low, high = row.ratio_quartiles
        result.add_row(
            f"  {row.method}",
            f"{row.tokens_per_second:.1f}",
            f"{row.ratio:.2f}",
            f"{low:.2f}-{high:.2f}",
            "" if row.spread is None else f"{row.spread:.0%}",
            f"{row.mean_accepted_length:.2f}",
            "" if row.round_overhead is None else f"{row.round_overhead:.2f}",
            "" if row.bandwidth_share is None else f"{row.bandwidth_share:.0%}",
            "" if row.prefill_seconds is None else f"{row.prefill_seconds / row.seconds:.0%}",
            "" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.0f}",
            str(row.num_new_tokens),
            same(row, sampling),
        )
    return result


def same(row: Measurement, sampling: Sampling) -> str:
    """Whether the tokens are plain decoding's, in a word or two."""
    if not row.is_compared and sampling.is_lossy:
        return "LOSSY"
    if not row.is_compared:
        return row.dtype if sampling.is_reproducible else "in law"
    if row.num_different:
        return "NO"
    return f"near ties: {row.num_near_ties}" if row.num_near_ties else "yes"


def near_ties(measurements: Sequence[Measurement]) -> list[str]:
    """What 16-bit arithmetic excuses, one line each."""
    return [
        f"near ties: {row.method} left plain decoding's text on {row.num_near_ties} of "
        f"{row.num_prompts} {row.task} prompts, each time between tokens within "
        f"{near_tie_in(row.dtype):.1%} of the largest logit, too close for {row.dtype} to tell"
        for row in measurements
        if row.num_near_ties and not row.is_total
    ]


def complaints(measurements: Sequence[Measurement]) -> list[str]:
    """What makes measurements worthless, one line each; empty if all is well."""
    lines = []
    if measurements and (num_missing := measurements[0].num_missing):
        lines.append(
            f"INCOMPLETE: {num_missing} turns, of all methods on one batch, have not been measured "
            "yet; the same command goes on with them"
        )
    last_task = measurements[-1].task if measurements else None  # all kinds, or the only one
    for row in measurements:
        is_long = row.num_new_tokens > 2 * row.num_prompts
        is_last = row.task == last_task
        if is_last and is_long and is_useless(row.method, row.mean_accepted_length):
            told = advice(row.mean_accepted_length, row.rounds)
            lines.append(f"OF NO USE: {row.method}: {told}")
        if row.is_total:
            continue  # its parts have complained
        if row.num_different:
            lines.append(
                f"DIFFERENT TOKENS: {row.method} did not say what plain decoding said on "
                f"{row.num_different} of {row.num_prompts} {row.task} prompts"
            )
        if row.num_recompiled:
            lines.append(
                f"RECOMPILED: {row.num_recompiled} measured runs of {row.method} on {row.task} "
                "compiled something; their times are wrong"
            )
    return lines
