"""The contents of a report, in the order of its pages; HTML and Markdown differ only in form."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specjax.bench.checks import complaints, near_ties
from specjax.bench.curves import Curve, read_curves
from specjax.bench.report import plots
from specjax.bench.report.tables import (
    COLUMNS,
    Grid,
    curve_table,
    depth_table,
    histogram_table,
    main_table,
    overview,
    task_tables,
    trace_table,
)
from specjax.bench.results import Stage, read_results
from specjax.bench.summary import ALL, Measurement, last_task_rows
from specjax.core.files import expand_user
from specjax.decoding.sampling import LOSSY, Sampling

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PASSED = (
    "All checks passed: every output matches plain decoding (near ties are listed), nothing was "
    "compiled while it was timed, and every trained drafter had tokens accepted."
)
# The labels of facts about the run; others are shown under their own name.
LABELS = {
    "fingerprint": "fingerprint of the weights",
    "bandwidth": "memory bandwidth (measured, median of all stages)",
    "num_prompts": "number of prompts",
    "num_left_out": "prompts left out, as too long for the target",
    "num_cut": "texts that end at the target's last position, before all new tokens",
    "prompts": "checksum of the prompts",
    "max_new_tokens": "new tokens at most",
    "batch": "prompts at once",
    "runs": "runs of each prompt",
    "revision": "source",
    "padded_length": "tokens that all prompts are padded to",
    "padded_width": "rows that every verifying pass is filled up to; 0: no filling",
}


class Picture(NamedTuple):
    """A picture, drawn when it is needed, and what it shows."""

    name: str
    caption: str
    draw: Callable[[], "Figure"]


Block = list[str] | Grid | Picture  # a list of lines, a table or a picture


@dataclass(frozen=True)
class Section:
    """A part of the report; `anchor` is its name in links."""

    anchor: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class ReportContents:
    """Everything that a report shows."""

    title: str
    facts: Sequence[tuple[str, str]]  # about the run, without the command
    command: str
    alarms: Sequence[str]  # what makes figures worthless
    sections: Sequence[Section]
    texts: Sequence[Mapping[str, Any]]


def read_contents(folder: Path) -> ReportContents:
    """Reads the folder of a benchmark.

    Raises:
        SpecjaxError: if it holds no benchmark or no rows yet, or a file is damaged.
    """
    folder = expand_user(folder)
    found = read_results(folder)
    about = dict(found.about)
    command = str(about.pop("command", ""))
    stages: dict[Stage, list[Measurement]] = {}
    for row in found.rows:
        stages.setdefault(Stage(row.temperature, row.batch), []).append(row)
    alarms, sections = [], []
    if len(stages) > 1:
        overall = {str(stage): last_task_rows(rows) for stage, rows in stages.items()}
        sections.append(Section("overview", "Overview", [overview(overall)]))
    for count, (stage, rows) in enumerate(stages.items(), 1):
        sampling = Sampling(stage.temperature, verification=about.get("verification", "coupled"))
        lossy = [LOSSY] if sampling.is_lossy else []
        alarms += [f"{stage}: {line}" for line in [*complaints(rows), *lossy]]
        blocks = list(_stage_blocks(stage, rows, sampling))
        sections.append(Section(f"stage-{count}", str(stage), blocks))
    meanings = [f"{column.title}: {column.meaning}" for column in COLUMNS]
    sections.append(Section("columns", "What the columns mean", [meanings]))
    sections += _trace_sections(found.traces)
    sections += _curve_sections(read_curves(folder))
    facts = list(facts_of(about))
    title = f"specjax bench: {about.get('target', 'results')}"
    return ReportContents(title, facts, command, alarms, sections, found.texts)


def facts_of(about: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the facts that are known, as label and text."""
    for name, value in about.items():
        label = LABELS.get(name, name)
        if name == "bandwidth":
            yield label, f"{value / 1e9:.1f} GB/s"
        elif name == "methods":
            yield label, ", ".join(value)
        elif isinstance(value, Mapping):
            yield label, ", ".join(f"{key} {each}" for key, each in value.items())
        elif isinstance(value, list):
            if value:
                yield label, ", ".join(map(str, value))
        elif value not in ("", None):
            yield label, str(value)


def _stage_blocks(stage: Stage, rows: Sequence[Measurement], sampling: Sampling) -> Iterator[Block]:
    overall = last_task_rows(rows)
    task = "all tasks" if overall[0].task == ALL else overall[0].task
    yield main_table(overall, sampling, f"{stage}, {task}")
    yield Picture(
        f"speeds-{stage}",
        "Speed over plain decoding, with its quartiles; bars that do not reach the dashed line, "
        "plain decoding, are hatched.",
        lambda: plots.speeds(overall),
    )
    if notes := near_ties(rows):
        yield notes
    drafting = [row for row in overall if len(row.accepted_lengths) > 2]
    for grid in (*task_tables(rows), histogram_table(drafting), depth_table(drafting)):
        if grid.rows:
            yield grid
    if drafting:
        yield Picture(
            f"rounds-{stage}",
            "Share of rounds by the number of tokens they committed, over all tasks; dashed: the "
            "mean, which is the accepted length.",
            lambda: plots.histograms(drafting),
        )
        yield Picture(
            f"depths-{stage}",
            "Acceptance rate by depth: of the rounds that had n - 1 drafted tokens accepted, the "
            "share that had one more; a round that drafted no more counts as rejected.",
            lambda: plots.rates(drafting),
        )


def _trace_sections(traces: Mapping[str, Any]) -> Iterable[Section]:
    methods = traces.get("methods", [])
    if len(methods) > 1:
        picture = Picture(
            "rounds-over-time",
            "Rounds whose parts were timed one by one, and below them plain decoding's steps for "
            "the same tokens. The number on a round is how many tokens it committed.",
            lambda: plots.rounds_over_time(methods),
        )
        title = f"Rounds over time, T={traces['temperature']:g}"
        yield Section("rounds", title, [picture, trace_table(methods)])


def _curve_sections(curves: Sequence[Curve]) -> Iterable[Section]:
    for count, curve in enumerate(curves, 1):
        picture = Picture(
            f"curve-{curve.title}",
            f"{curve.title}: accepted length and tokens per second over {curve.setting}.",
            lambda curve=curve: plots.curve(curve),
        )
        yield Section(f"curve-{count}", curve.title, [picture, curve_table(curve)])
