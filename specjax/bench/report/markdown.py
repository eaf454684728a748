"""The report of a benchmark: a Markdown file with tables, and charts as PNG files beside it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.bench.checks import near_ties, problems
from specjax.bench.report import plots
from specjax.bench.report.tables import (
    MEANINGS,
    Grid,
    depth_table,
    main_table,
    overview,
    task_tables,
)
from specjax.bench.results import Condition, FinishedResults, read_results
from specjax.bench.summary import ALL, Measurement, last_task_rows
from specjax.core.files import check_writable, expand_user, write_whole
from specjax.decoding.sampling import LOSSY, Sampling

REPORT = "report.md"
SPEEDS = (
    "Speed over plain decoding, with quartiles; methods slower than plain decoding (dashed line) "
    "are hatched."
)
PASSED = (
    "All checks passed: every output that could be compared matches plain decoding (near ties are "
    "listed), nothing compiled during a timed run, and no head or draft model is useless (that of "
    "`hybrid` is not checked)."
)
# The labels of facts about the run; others are shown under their own name.
LABELS = {
    "fingerprint": "fingerprint of the weights",
    "bandwidth": "memory bandwidth (measured, median of all conditions)",
    "num_prompts": "number of prompts",
    "num_left_out": "prompts left out because they are too long for the target",
    "num_cut": "texts that end at the target's last position",
    "prompts": "checksum of the prompts",
    "max_new_tokens": "maximum number of new tokens",
    "batch": "batch size",
    "runs": "runs of each prompt",
    "revision": "source",
    "padded_length": "tokens that all prompts are padded to",
    "padded_width": "tokens per sequence that every verifying pass is padded to; 0: no padding",
}


def write_report(folder: Path) -> Path:
    """Writes the report of a benchmark's folder, with its charts, and returns its file."""
    folder = expand_user(folder)
    path = folder / REPORT
    check_writable(path, is_file=True)
    text = "\n\n".join(_Report(folder, read_results(folder)).parts()) + "\n"
    write_whole(path, text.encode())
    return path


class _Report:
    """The parts of a report, in order."""

    def __init__(self, folder: Path, results: FinishedResults):
        self.folder, self.results = folder, results
        self.conditions: dict[Condition, list[Measurement]] = {}
        for row in results.rows:
            self.conditions.setdefault(Condition(row.temperature, row.batch), []).append(row)

    def parts(self) -> Iterator[str]:
        about = dict(self.results.about)
        command = str(about.pop("command", ""))
        yield f"# specjax bench: {_line(str(about.get('target', 'results')))}"
        alarms = list(self._alarms())
        warning = f"> **DO NOT TRUST THESE RESULTS**\n>\n{_bullets(alarms, '> - ')}"
        yield warning if alarms else PASSED
        yield _bullets([f"{label}: {text}" for label, text in _facts(about)])
        if command:
            yield f"```\n{command}\n```"
        if len(self.conditions) > 1:
            overall = {str(c): last_task_rows(rows) for c, rows in self.conditions.items()}
            yield from ("## Overview", table(overview(overall)))
        for condition, rows in self.conditions.items():
            yield f"## {condition}"
            yield from self._under(condition, rows)
        yield "## What the columns mean"
        yield _bullets([f"{title}: {meaning}" for title, meaning in MEANINGS.items()])

    def _sampling(self, condition: Condition) -> Sampling:
        verification = self.results.about.get("verification", "coupled")
        return Sampling(condition.temperature, verification=verification)

    def _alarms(self) -> Iterator[str]:
        for condition, rows in self.conditions.items():
            lossy = [LOSSY] if self._sampling(condition).is_lossy else []
            yield from (f"{condition}: {line}" for line in [*problems(rows), *lossy])

    def _under(self, condition: Condition, rows: Sequence[Measurement]) -> Iterator[str]:
        """Yields tables and charts of one condition."""
        overall = last_task_rows(rows)
        task = "all tasks" if overall[0].task == ALL else overall[0].task
        yield table(main_table(overall, self._sampling(condition), f"{condition}, {task}"))
        chart = plots.save_png(plots.speeds(overall), self.folder, f"speeds-{condition}")
        yield f"![Speeds, {condition}]({chart.name})\n\n{SPEEDS}"
        if notes := near_ties(rows):
            yield _bullets(notes)
        for grid in (*task_tables(rows), depth_table(overall)):
            if grid.rows:
                yield table(grid)


def table(grid: Grid) -> str:
    """Formats a table, its caption above it."""
    lines = [grid.header, ["---", *["---:"] * (len(grid.header) - 1)], *grid.rows]
    cells = [[_line(cell).replace("|", "\\|") for cell in line] for line in lines]
    rows = ["| " + " | ".join(line) + " |" for line in cells]
    return "\n".join([f"**{_line(grid.caption)}**", "", *rows])


def _facts(about: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields labels and texts of the facts that are known."""
    formats: dict[str, Callable[[Any], str]] = {
        "bandwidth": lambda value: f"{value / 1e9:.1f} GB/s",
        "methods": ", ".join,
    }
    for name, value in about.items():
        label = LABELS.get(name, name)
        if name in formats:
            yield label, formats[name](value)
        elif isinstance(value, Mapping):
            yield label, ", ".join(f"{key} {entry}" for key, entry in value.items())
        elif isinstance(value, list) and value:
            yield label, ", ".join(map(str, value))
        elif value not in ("", None, []):
            yield label, str(value)


def _bullets(lines: Sequence[str], bullet: str = "- ") -> str:
    return "\n".join(bullet + _line(line) for line in lines)


def _line(text: str) -> str:
    """Returns one line without markup."""
    return " ".join(text.split()).replace("<", "\\<")
