"""What a benchmark prints and writes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from specjax.bench.measure import PLAIN, Measurement

ALL = "all"  # the task of the rows that sum up all kinds


def show(measurements: Sequence[Measurement], num_runs: int) -> None:
    """Prints the table, and in red whatever makes it worthless."""
    console = Console(soft_wrap=True, markup=False, highlight=False)
    console.print(table(measurements))
    one_task = [row for row in measurements if row.task == measurements[0].task]
    compiling = sum(row.compile_seconds for row in one_task)
    console.print(
        f"medians of {num_runs} runs in turn; prefill counts, compiling ({compiling:.1f} s) does "
        "not; an idle machine tells more"
    )
    for line in complaints(measurements):
        console.print(line, style="bold red")


def table(measurements: Sequence[Measurement]) -> Table:
    """One row per method under each kind of task.

    `x plain` and its quartiles come from pairs of runs, `prefill` is its share of plain decoding's
    seconds, and `same` tells whether the tokens are those of plain decoding.
    """
    result = Table("task, method", box=None, pad_edge=False)
    for title in ("tokens/s", "x plain", "quartiles", "accepted", "prefill", "tokens", "same"):
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
            f"{row.mean_accepted_length:.2f}",
            f"{row.prefill_seconds / row.seconds:.0%}" if row.method == PLAIN else "",
            str(row.num_new_tokens),
            "yes" if row.identical else "NO",
        )
    return result


def complaints(measurements: Sequence[Measurement]) -> list[str]:
    """What makes measurements worthless, one line each; empty if all is well."""
    lines = []
    for row in measurements:
        if row.task == ALL:
            continue  # its parts have complained
        if not row.identical:
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


def write(
    rows: list[Measurement], out: TextIO | None, about: Mapping[str, Any] | None
) -> list[Measurement]:
    """Writes one JSON object per row, at once, with `about` in each; returns the rows."""
    for row in rows if out else ():
        values = asdict(row) | {"identical": row.identical} | dict(about or {})
        print(json.dumps(values), file=out, flush=True)
    return rows
