"""The tables that `specjax bench` prints."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from specjax.bench.checks import near_ties, problems
from specjax.bench.report.tables import ALWAYS, COLUMNS, WIDE, Grid
from specjax.bench.summary import Measurement
from specjax.core.text import safe_console
from specjax.decoding.sampling import LOSSY, Sampling

MAX_WIDTH = 1000  # of a table


def show(
    rows: Sequence[Measurement],
    num_runs: int,
    bandwidth: float | None,
    sampling: Sampling = Sampling(),
) -> None:
    """Prints the table, what some columns mean, and in red anything that invalidates it.

    All rows have the same temperature and batch size; `bandwidth` is in bytes per second, if known.
    """
    console = safe_console()
    console.soft_wrap = not console.is_terminal  # a pipe gets whole lines
    full = table(rows, sampling)
    fits = not console.is_terminal or natural_width(full, console) <= console.width
    print_table(full if fits else table(rows, sampling, is_narrow=True))
    if not fits:
        console.print("a wider terminal shows more columns, and so does `specjax report`")
    one_task = [row for row in rows if row.task == rows[0].task]
    compiling = sum(row.compile_seconds for row in one_task)
    from_cache = ", partly from a cache," if any(row.is_cached for row in one_task) else ""
    runs = f"medians of {num_runs} runs" if num_runs > 1 else "one run each"
    console.print(
        f"{runs}, all methods in turn, prefill included; {compiling:.1f} s of compiling"
        f"{from_cache} not counted\nmemory: the peak of a program, weights included"
    )
    if fits:
        console.print("round: the time of a round over that of a plain step")
    if fits and bandwidth is not None:
        is_cached = any((row.bandwidth_share or 0) > 1 for row in rows)
        console.print(
            "bandwidth: bytes per second that the target's passes must read, over the "
            f"{bandwidth / 1e9:.0f} GB/s that this device reads"
            + ("; above 100%, the caches hold the weights" if is_cached else "")
        )
    for line in near_ties(rows):
        console.print(line)
    for line in problems(rows):
        console.print(line, style="bold red")
    if sampling.is_lossy:
        console.print(LOSSY, style="bold red")


def print_grid(grid: Grid) -> None:
    """Prints a table of a report; all columns but the first hold numbers."""
    table = Table(grid.header[0], title=grid.caption, box=None)
    for title in grid.header[1:]:
        table.add_column(title, justify="right")
    for row in grid.rows:
        table.add_row(*row)
    print_table(table)


def print_table(table: Table) -> None:
    """Prints a table; no number is cut off even where the terminal is narrower."""
    console = safe_console(soft_wrap=True)
    console.width = max(console.width, natural_width(table, console))
    console.print(table)


def natural_width(table: Table, console: Console) -> int:
    """Returns the columns of a terminal that a table needs."""
    return console.measure(table, options=console.options.update(width=MAX_WIDTH)).maximum


def table(
    rows: Sequence[Measurement], sampling: Sampling = Sampling(), is_narrow: bool = False
) -> Table:
    """Makes one row per method under each kind of task, with the columns for terminals."""
    first = rows[0]
    batch = "" if first.batch == 1 else f", {first.batch} at once"
    columns = [
        column for column in COLUMNS if column.in_terminal >= (ALWAYS if is_narrow else WIDE)
    ]
    result = Table(f"T={first.temperature:g}{batch}", box=None, pad_edge=False)
    for column in columns:
        title = column.title.replace(" ", "\n") if is_narrow else column.title
        result.add_column(title, justify="right")
    task = None
    for row in rows:
        if row.task != task:
            result.add_row(row.task)
            task = row.task
        result.add_row(f"  {row.method}", *(column.text(row, sampling) for column in columns))
    return result
