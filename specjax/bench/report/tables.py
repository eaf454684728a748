"""The tables of a report, for the terminal and for Markdown."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from specjax.bench.checks import same
from specjax.bench.summary import Measurement
from specjax.decoding.sampling import Sampling

MAX_DEPTHS = 10  # columns of the table of acceptance rates
UNKNOWN = "-"


class Grid(NamedTuple):
    """A table of text; the first cell of a row is its heading."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


class Column(NamedTuple):
    """One column of the main table."""

    title: str
    in_terminal: int
    text: Callable[[Measurement, Sampling], str]


def number(value: float | None, digits: int = 2) -> str:
    """Formats a number; None is unknown."""
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def _compile_seconds(row: Measurement) -> str:
    return number(row.compile_seconds, 1) + (" (cached)" if row.is_cached else "")


def _seconds(value: float | None) -> str:
    return number(value, 3 if value is not None and value < 10 else 1)


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0%}"


NEVER, WIDE, ALWAYS = range(3)  # which terminals show a column; the report shows all
COLUMNS = (
    Column("tokens/s", ALWAYS, lambda row, _: number(row.tokens_per_second, 1)),
    Column("x plain", ALWAYS, lambda row, _: number(row.ratio)),
    Column("quartiles", ALWAYS, lambda row, _: "-".join(map(number, row.ratio_quartiles))),
    Column("accepted length", ALWAYS, lambda row, _: number(row.mean_accepted_length)),
    Column("tau", WIDE, lambda row, _: number(row.published.tau)),
    Column("round", WIDE, lambda row, _: number(row.round_overhead)),
    Column("bandwidth", WIDE, lambda row, _: _share(row.bandwidth_share)),
    Column("prefill s", WIDE, lambda row, _: _seconds(row.prefill_seconds)),
    Column("decode s", NEVER, lambda row, _: _seconds(row.decode_seconds)),
    Column("compile s", NEVER, lambda row, _: _compile_seconds(row)),
    Column("memory MB", ALWAYS, lambda row, _: number(row.peak_bytes and row.peak_bytes / 1e6, 0)),
    Column("prompts", NEVER, lambda row, _: str(row.num_prompts)),
    Column("tokens", WIDE, lambda row, _: str(row.num_new_tokens)),
    Column("same", ALWAYS, same),
)
MEANINGS = {
    "tokens/s": "new tokens per second, medians of the runs; includes prefill, not compiling",
    "x plain": "speed over plain decoding's, median over pairs of runs (same prompts and trial)",
    "quartiles": "lower and upper quartile of x plain",
    "accepted length": "new tokens per round, bonus token included",
    "tau": "accepted length as EAGLE and HASS count it: includes drafted tokens beyond EOS and the "
    "limit, and every question (all turns of a chat) has the same weight",
    "round": "round overhead: seconds of a decoding round over those of a plain step, the median",
    "bandwidth": "bytes per second that the target's passes must read, over those that this device "
    "can read; above 100%, the caches hold the weights",
    "prefill s": "seconds until the first round, of one run of all prompts",
    "decode s": "seconds of all rounds, of one run of all prompts",
    "compile s": "seconds to compile; cached: a part came from a cache of compiled programs",
    "memory MB": "peak of a program, weights included",
    "prompts": "prompts run, repeats that fill a batch included",
    "tokens": "new tokens of one run of all prompts",
    "same": "whether the tokens are plain decoding's: yes; NO; LOSSY: not promised, not even in "
    "distribution; in distribution: only the distribution is promised; near ties: prompts where "
    "16-bit arithmetic could not rank two tokens; a dtype: another one, so not compared",
}


def main_table(rows: Sequence[Measurement], sampling: Sampling, caption: str) -> Grid:
    """Makes one row per method; `rows` are of one kind of task."""
    cells = [[row.method, *(column.text(row, sampling) for column in COLUMNS)] for row in rows]
    return Grid(caption, ["method", *(column.title for column in COLUMNS)], cells)


def task_tables(rows: Sequence[Measurement]) -> list[Grid]:
    """Makes the tables of accepted length and speed: methods as rows, tasks as columns."""
    lengths = {(row.method, row.task): row.mean_accepted_length for row in rows}
    ratios = {(row.method, row.task): row.ratio for row in rows}
    return [
        _crossed("Accepted length per task", lengths),
        _crossed("Speed over plain decoding (x plain) per task", ratios),
    ]


def overview(conditions: Mapping[str, Sequence[Measurement]]) -> Grid:
    """Makes the table of speeds over all tasks, with a column per condition."""
    values = {(row.method, name): row.ratio for name, rows in conditions.items() for row in rows}
    return _crossed("Speed over plain decoding (x plain), all tasks", values)


def _crossed(caption: str, values: Mapping[tuple[str, str], float]) -> Grid:
    """Makes a table of values by method and column, both in the order in which they first come."""
    methods = dict.fromkeys(method for method, _ in values)
    columns = dict.fromkeys(column for _, column in values)
    cells = [
        [method, *(number(values.get((method, column))) for column in columns)]
        for method in methods
    ]
    return Grid(caption, ["method", *columns], cells)


def depth_table(rows: Sequence[Measurement]) -> Grid:
    """Makes the table of acceptance rates at the first depths, of methods that drafted."""
    values = {
        (row.method, str(depth)): rate
        for row in rows
        for depth, rate in enumerate(row.rates[:MAX_DEPTHS], start=1)
    }
    caption = (
        "Acceptance rate by depth: of the rounds that got that far, the share that accepted more"
    )
    return _crossed(caption, values)
