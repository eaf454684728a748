"""The report of a benchmark as Markdown: tables, and pictures as PNG files beside it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from specjax.bench.report.contents import PASSED, Block, Picture, ReportContents
from specjax.bench.report.plots import save_png
from specjax.bench.report.tables import Grid
from specjax.core.files import writable

REPORT = "report.md"


def write_markdown(contents: ReportContents, folder: Path) -> Path:
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
    """Formats a table, its caption above it."""
    lines = [grid.header, ["---", *["---:"] * (len(grid.header) - 1)], *grid.rows]
    rows = ["| " + " | ".join(map(_cell, line)) + " |" for line in lines]
    return "\n".join([f"**{_line(grid.caption)}**", "", *rows])


def _parts(contents: ReportContents, folder: Path) -> Iterator[str]:
    yield f"# {_line(contents.title)}"
    if contents.alarms:
        yield "> **WRONG WITH THESE RESULTS**\n>\n" + _bullets(contents.alarms, "> - ")
    else:
        yield PASSED
    yield _bullets([f"{name}: {text}" for name, text in contents.facts])
    if contents.command:
        yield f"```\n{contents.command}\n```"
    for section in contents.sections:
        yield f"## {_line(section.title)}"
        for block in section.blocks:
            yield _block(block, folder)


def _block(block: Block, folder: Path) -> str:
    match block:
        case Grid():
            return table(block)
        case Picture(name, caption, draw):
            path = save_png(draw(), folder, name)
            return f"![{_line(name)}]({path.name})\n\n{_line(caption)}"
        case lines:
            return _bullets(lines)


def _bullets(lines: Sequence[str], bullet: str = "- ") -> str:
    return "\n".join(bullet + _line(line) for line in lines)


def _cell(text: str) -> str:
    return _line(text).replace("|", "\\|")


def _line(text: str) -> str:
    """Returns one line without markup."""
    return " ".join(text.split()).replace("<", "\\<")
