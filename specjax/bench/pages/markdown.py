"""The report of a benchmark as Markdown: tables, and pictures as PNG files beside it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specjax.bench.pages import plots
from specjax.bench.pages.contents import Contents, StagePage, facts_of
from specjax.bench.pages.tables import (
    COLUMNS,
    Grid,
    curve_table,
    oracle_table,
    rule_table,
    trace_table,
)
from specjax.core.files import writable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT = "report.md"


def write_markdown(contents: Contents, folder: Path) -> Path:
    """Writes the report and its pictures, and returns its file.

    Raises:
        SpecjaxError: if a file cannot be written.
    """
    text = "\n\n".join(_parts(contents, folder)) + "\n"
    path = folder / REPORT
    with writable(path):
        path.write_text(text, encoding="utf-8")
    return path


def table(grid: Grid) -> str:
    """A table in Markdown, its caption above."""
    lines = [grid.header, ["---", *["---:"] * (len(grid.header) - 1)], *grid.rows]
    rows = ["| " + " | ".join(map(_cell, line)) + " |" for line in lines]
    return "\n".join([f"**{_line(grid.caption)}**", "", *rows])


def _cell(text: str) -> str:
    return _line(text).replace("|", "\\|")


def _line(text: str) -> str:
    """One line that is no markup."""
    return " ".join(text.split()).replace("<", "\\<")


def _parts(contents: Contents, folder: Path) -> Iterator[str]:
    yield f"# {_line(contents.title)}"
    if contents.alarms:
        yield "> **WRONG WITH THESE RESULTS**\n>\n" + _list(contents.alarms, "> - ")
    yield _list([f"{name}: {text}" for name, text in contents.facts])
    if contents.command:
        yield f"```\n{contents.command}\n```"
    if contents.overview:
        yield table(contents.overview)
    for stage in contents.stages:
        yield from _stage(stage, folder)
    yield "## What the columns mean"
    yield _list([f"{column.title}: {column.meaning}" for column in COLUMNS])
    yield from _traces(contents, folder)
    yield from _oracle(contents, folder)
    for curve in contents.curves:
        yield f"## {_line(curve.title)}"
        yield _shown(curve.title, plots.save_curve(curve, folder))
        yield table(curve_table(curve))


def _stage(stage: StagePage, folder: Path) -> Iterator[str]:
    yield f"## {stage.name}"
    yield table(stage.main)
    if stage.notes:
        yield _list(stage.notes)
    for grid in stage.tables:
        if grid.rows:
            yield table(grid)
    if stage.drafting:
        yield _picture(plots.histograms(stage.drafting), folder, f"rounds-{stage.name}")
        yield _picture(plots.rates(stage.drafting), folder, f"depths-{stage.name}")


def _traces(contents: Contents, folder: Path) -> Iterator[str]:
    methods = contents.traces.get("methods", [])
    if len(methods) < 2:
        return
    yield f"## Rounds over time, T={contents.traces['temperature']:g}"
    yield _picture(plots.rounds_over_time(methods), folder, "rounds-over-time")
    yield table(trace_table(methods))


def _oracle(contents: Contents, folder: Path) -> Iterator[str]:
    found = contents.oracle
    if found is None:
        return
    yield "## Draft lengths of the oracle"
    yield _line(facts_of(found.about))
    yield _picture(plots.oracle_lengths(found.lengths), folder, "oracle-lengths")
    yield _picture(plots.oracle_course(found.lengths), folder, "oracle-course")
    yield table(oracle_table(found.lengths))
    yield table(rule_table(found.rules))
    yield _list(found.equation_1)


def _list(lines: Sequence[str], bullet: str = "- ") -> str:
    return "\n".join(bullet + _line(line) for line in lines)


def _picture(figure: "Figure", folder: Path, name: str) -> str:
    return _shown(name, plots.save_png(figure, folder, name))


def _shown(name: str, picture: Path) -> str:
    return f"![{name}]({picture.name})"
