"""The tables of a report, as text: what the HTML page and the Markdown file have in common."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from specjax.bench.curves import Curve
from specjax.bench.oracle import NUM_BARS, OracleLengths, RuleFigures
from specjax.bench.report import same
from specjax.bench.rounds import PARTS
from specjax.bench.summary import Measurement
from specjax.decoding.sampling import Sampling

MOST_DEPTHS = 10  # columns of the table of acceptance rates; the pictures show all
UNKNOWN = "-"


class Grid(NamedTuple):
    """A table of text. The first cell of a row is its heading; numbers stand to the right."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


class Column(NamedTuple):
    """One column of the main table."""

    title: str
    meaning: str
    text: Callable[[Measurement, Sampling], str]


def _range(quartiles: tuple[float, float] | None) -> str:
    if quartiles is None:
        return UNKNOWN
    low, high = quartiles
    return f"{low:.2f}-{high:.2f}"


def _ratio(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"


def _seconds(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _compile_seconds(row: Measurement) -> str:
    return f"{row.compile_seconds:.1f}" + (" (cached)" if row.is_cached else "")


def _megabytes(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value / 1e6:.0f}"


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0%}"


SPEED = "x plain"  # the column that has bars beside it
COLUMNS = (
    Column(
        "tokens/s",
        "new tokens per second, medians of the runs; prefill counts, compiling does not",
        lambda row, _: f"{row.tokens_per_second:.1f}",
    ),
    Column(
        SPEED,
        "speed over plain decoding's in pairs of runs (same prompts, same turn): the median",
        lambda row, _: f"{row.ratio:.2f}",
    ),
    Column(
        "quartiles", "of x plain: half of the pairs", lambda row, _: _range(row.ratio_quartiles)
    ),
    Column(
        "same",
        "whether the tokens are plain decoding's: yes; NO; LOSSY: not promised, not even in "
        "distribution; in law: in distribution only; near ties: prompts where 16-bit arithmetic "
        "could not tell two tokens apart; a dtype: another one than plain decoding's, not compared",
        same,
    ),
    Column(
        "accepted length",
        "new tokens per round, the target's own token included",
        lambda row, _: f"{row.mean_accepted_length:.2f}",
    ),
    Column(
        "round",
        "round overhead: seconds of a round of decoding over those of a plain step, the median",
        lambda row, _: _ratio(row.round_overhead),
    ),
    Column(
        "round's quartiles",
        "of the round overhead: half of the pairs",
        lambda row, _: _range(row.round_overhead_quartiles),
    ),
    Column(
        "bandwidth",
        "bytes that the target's passes must read per second, over what this device can read; "
        "beyond 100% caches hold them",
        lambda row, _: _share(row.bandwidth_share),
    ),
    Column(
        "prefill s",
        "seconds until the first round, of one run of all prompts",
        lambda row, _: _seconds(row.prefill_seconds),
    ),
    Column(
        "decode s",
        "seconds of all rounds, of one run of all prompts",
        lambda row, _: _seconds(row.decode_seconds),
    ),
    Column(
        "compile s",
        "seconds to compile; cached: a part came from a cache of compiled programs",
        lambda row, _: _compile_seconds(row),
    ),
    Column(
        "memory MB",
        "peak: all that a program holds at once, weights included",
        lambda row, _: _megabytes(row.peak_bytes),
    ),
    Column("prompts", "that were measured", lambda row, _: str(row.num_prompts)),
    Column(
        "tokens", "new tokens of one run of all prompts", lambda row, _: str(row.num_new_tokens)
    ),
    Column(
        "spread",
        "slowest less fastest run of all prompts, over the median run",
        lambda row, _: _share(row.spread),
    ),
)


def main_table(rows: Sequence[Measurement], sampling: Sampling, caption: str) -> Grid:
    """One row per method; `rows` are of one kind of task."""
    cells = [[row.method, *(column.text(row, sampling) for column in COLUMNS)] for row in rows]
    return Grid(caption, ["method", *(column.title for column in COLUMNS)], cells)


def task_tables(rows: Sequence[Measurement]) -> list[Grid]:
    """Accepted length and speed, methods as rows and tasks as columns."""
    tasks = list(dict.fromkeys(row.task for row in rows))
    figures: dict[str, Callable[[Measurement], float]] = {
        "Accepted length per task": lambda row: row.mean_accepted_length,
        "Speed over plain decoding (x plain) per task": lambda row: row.ratio,
    }
    return [
        _crossed(caption, tasks, {(row.method, row.task): read(row) for row in rows})
        for caption, read in figures.items()
    ]


def overview(stages: Mapping[str, Sequence[Measurement]]) -> Grid:
    """Speed over all tasks: methods as rows, and temperatures and sizes of batches as columns."""
    values = {(row.method, name): row.ratio for name, rows in stages.items() for row in rows}
    return _crossed("Speed over plain decoding (x plain), all tasks", list(stages), values)


def _crossed(caption: str, columns: Sequence[str], values: Mapping[tuple[str, str], float]) -> Grid:
    methods = dict.fromkeys(method for method, _ in values)
    cells = [
        [method, *(_number(values.get((method, column))) for column in columns)]
        for method in methods
    ]
    return Grid(caption, ["method", *columns], cells)


def _number(value: float | None, digits: int = 2) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def depth_table(rows: Sequence[Measurement]) -> Grid:
    """The acceptance rate at the first depths, of methods that drafted."""
    deepest = min(MOST_DEPTHS, max((len(row.rates) for row in rows), default=0))
    cells = []
    for row in rows:
        rates = [*row.rates[:deepest], *[None] * (deepest - len(row.rates))]
        if row.rates:
            cells.append([row.method, *map(_number, rates)])
    caption = "Acceptance rate by depth"
    return Grid(caption, ["method", *map(str, range(1, deepest + 1))], cells)


def histogram_table(rows: Sequence[Measurement]) -> Grid:
    """How many rounds committed 1, 2, ... tokens; the last column has those beyond."""
    told = [row for row in rows if row.accepted_lengths]
    deepest = max((_deepest(row.accepted_lengths) for row in told), default=0)
    most = min(deepest, MOST_DEPTHS + 1)
    header = ["method", *map(str, range(1, most + 1))]
    if deepest > most:
        header.append(f"over {most}")
    cells = []
    for row in told:
        counts = [*row.accepted_lengths[1:], *[0] * deepest][:deepest]
        beyond = [sum(counts[most:])] if deepest > most else []
        cells.append([row.method, *map(str, [*counts[:most], *beyond])])
    return Grid("Rounds that committed so many tokens", header, cells)


def _deepest(counts: Sequence[int]) -> int:
    return max((number for number, count in enumerate(counts) if count), default=0)


def trace_table(methods: Sequence[Mapping[str, Any]]) -> Grid:
    """Where the time of a round goes, in milliseconds."""
    parts = [f"{part}_seconds" for part in (*PARTS, "round", "one_program")]
    cells = [
        [
            each["method"],
            *(f"{1e3 * each[part]:.3f}" for part in parts),
            f"{each['accepted_length']:.2f}",
        ]
        for each in methods
    ]
    header = ["method", *PARTS, "together", "in one program", "accepted length"]
    return Grid("Milliseconds per round: medians", header, cells)


def oracle_table(lengths: Sequence[OracleLengths]) -> Grid:
    """Mean, deviation and course of the oracle's lengths."""
    tenths = [f"{number}/{NUM_BARS}" for number in range(1, NUM_BARS + 1)]
    cells = [
        [each.task, _number(each.mean), _number(each.std), *(_number(at, 1) for at in each.course)]
        for each in lengths
    ]
    caption = "Tokens that the oracle drafts per round, also by tenths of a run"
    return Grid(caption, ["task", "mean", "std", *tenths], cells)


def rule_table(rules: Sequence[RuleFigures]) -> Grid:
    """What the rules for the draft length are worth."""
    cells = [
        [
            f"{each.task}, {each.rule}",
            f"{each.ms_per_token:.3f}",
            f"{each.ratio:.2f}",
            _range(each.ratio_quartiles),
            f"{each.accepted_length:.2f}",
            {True: "yes", False: "NO", None: UNKNOWN}[each.identical],
        ]
        for each in rules
    ]
    header = ["task, rule", "ms/token", SPEED, "quartiles", "accepted length", "same"]
    return Grid("Rules for the draft length", header, cells)


def curve_table(curve: Curve) -> Grid:
    """Accepted length and tokens per second of every series, by value."""
    values = dict.fromkeys(str(point.value) for line in curve.series.values() for point in line)
    header = [curve.setting]
    cells = [[value] for value in values]
    for name, line in curve.series.items():
        header += [name, f"{name}, tokens/s"]
        points = {str(point.value): point for point in line}
        for row in cells:
            point = points.get(row[0])
            row.append(_number(point.accepted_length if point else None))
            row.append(_number(point.tokens_per_second if point else None, 0))
    return Grid(curve.title, header, cells)
