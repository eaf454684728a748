"""Figures of a finished benchmark for a recipe, and their table beside the published ones."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, pstdev

from specjax.bench.measure import PLAIN, Sample
from specjax.bench.results import Condition, read_results, read_samples
from specjax.bench.summary import Measurement

from .recipe import ALL, Cell, Figure, Part, Recipe, RecipeColumn

Figures = dict[Cell, Figure]
NUM_PARTS = 10  # of a run, for the course of the draft lengths
PLAIN_TITLE = "Plain"  # in the tables
METRICS: Mapping[str, Callable[[Measurement], Figure]] = {
    "speedup": lambda row: Figure(row.published.speed_up, row.published.speed_up_std),
    "throughput": lambda row: Figure(
        row.published.tokens_per_second, row.published.tokens_per_second_std
    ),
    "accepted_length": lambda row: Figure(row.published.tau),
    "pooled_accepted_length": lambda row: Figure(row.published.pooled_tau),
    "latency": lambda row: Figure(1e3 / row.published.tokens_per_second),  # ms per token
}
COUNTED = ("rate", "draft_length", "draft_share", "passes")  # metrics that rounds are counted for


def figures_of(
    recipe: Recipe, part: Part, folder: Path, titles: Mapping[str, str]
) -> Iterator[tuple[Cell, Figure]]:
    """Yields the figures of the benchmark in `folder`; `titles` of rows are by variant name."""
    rows = {(row.temperature, row.method, row.task): row for row in read_results(folder).rows}
    samples = read_samples(folder) if uses_samples(recipe) else {}
    at = part.data[0] if recipe.model_of else ALL
    for temperature, (name, title) in product(recipe.temperatures, titles.items()):
        for column, spec in recipe.columns.items():
            data = [title for title in part.data if spec.data in (ALL, title)]
            measured = [rows.get((temperature, name, title)) for title in data]
            if not measured or None in measured:
                continue
            timed = samples.get(Condition(temperature, 1), ())
            of_method = [sample for sample in timed if sample.method == name]
            figure = _figure(spec, [row for row in measured if row], of_method)
            if figure is not None:
                yield Cell(temperature, part.model, at, title, column), figure


def uses_samples(recipe: Recipe) -> bool:
    """Whether a recipe counts rounds, so that the timed runs must be read."""
    return any(column.metric.split()[0] in COUNTED[1:] for column in recipe.columns.values())


def _figure(
    column: RecipeColumn, rows: Sequence[Measurement], samples: Sequence[Sample]
) -> Figure | None:
    metric, _, number = column.metric.partition(" ")
    if read := METRICS.get(metric):
        return _mean([read(row) for row in rows])
    if metric == "rate":
        rates = [row.rates[int(number) - 1] for row in rows if len(row.rates) >= int(number)]
        return Figure(fmean(rates)) if rates else None
    if metric == "passes":
        return Figure(fmean(sample.passes for sample in samples))
    if metric not in COUNTED:  # nothing counts it, such as drafts that were rejected
        return None
    runs = [
        drafted_lengths(text.from_draft)
        for sample in samples
        if sample.repeat == 0
        for text in sample.texts
    ]
    lengths = [length for run in runs for length in run]
    if metric == "draft_share":
        return Figure(lengths.count(int(number)) / len(lengths))
    if metric == "draft_length" and number:
        lengths = list(in_part(runs, int(number) - 1))
    return Figure(fmean(lengths), pstdev(lengths)) if lengths else None


def _mean(figures: Sequence[Figure]) -> Figure:
    """Returns the mean over data sets; its spread is the mean of theirs, as no run joins them."""
    spreads = [figure.spread for figure in figures if figure.spread is not None]
    return Figure(fmean(figure.value for figure in figures), fmean(spreads) if spreads else None)


def drafted_lengths(from_draft: Sequence[bool]) -> list[int]:
    """Returns how many drafted tokens each round committed: every other token ends a round."""
    lengths, count = [], 0
    for is_drafted in from_draft:
        count += is_drafted
        if not is_drafted:
            lengths.append(count)
            count = 0
    return [*lengths, count] if count else lengths  # the last round may have been cut


def in_part(runs: Iterable[Sequence[int]], part: int) -> Iterator[int]:
    """Yields the lengths in one of `NUM_PARTS` parts of the runs, counted from 0."""
    for run in runs:
        yield from (length for n, length in enumerate(run) if n * NUM_PARTS // len(run) == part)


def improvement_factor(acceptance_rate: float, length: int, cost: float) -> float:
    """Returns DISCO's equation 1: the gain of drafts of `length`, a draft pass costing `cost`."""
    return sum(acceptance_rate**n for n in range(length + 1)) / (length * cost + 1)


# ---- The table -----------------------------------------------------------------------------------


def comparison(recipe: Recipe, ours: Figures) -> list[list[str]]:
    """Returns the lines of a table: in each cell our figure, theirs, and the difference.

    Rows are those of either side, of the models that were run; the first line names the columns.
    """
    run = {cell[:3] for cell in ours}  # at which temperature, with which model, on which data
    cells = [cell for cell in (*recipe.published, *ours) if cell[:3] in run]
    rows = dict.fromkeys(cell._replace(column="") for cell in cells)
    names = [name for name in Cell._fields[:4] if len({getattr(row, name) for row in rows}) > 1]
    names = names or ["method"]
    lines = [[*names, *recipe.columns]]
    for row in rows:
        label = [_label(name, getattr(row, name)) for name in names]
        places = [row._replace(column=column) for column in recipe.columns]
        figures = [_compared(ours.get(at), recipe.published.get(at)) for at in places]
        lines.append([*label, *figures])
    return lines


def _label(name: str, value: float | str) -> str:
    return f"T={value:g}" if name == "temperature" else str(value)


def _compared(ours: Figure | None, theirs: Figure | None) -> str:
    if ours is None or theirs is None:
        return str(ours) if ours else f"- / {theirs}" if theirs else "-"
    if theirs.value == 0:
        return f"{ours} / {theirs}"
    return f"{ours} / {theirs} ({ours.value / theirs.value - 1:+.0%})"


def titles_of(recipe: Recipe, names: Mapping[str, str]) -> dict[str, str]:
    """Returns the titles by name, with plain decoding if the published rows have it."""
    has_plain = any(cell.method == PLAIN_TITLE for cell in recipe.published)
    return ({PLAIN: PLAIN_TITLE} if has_plain else {}) | dict(names)
