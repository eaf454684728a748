"""What a report shows of a folder, in the order of its pages; HTML and Markdown differ in form."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from specjax.bench.curves import Curve, read_curves
from specjax.bench.oracle import OracleResults, read_oracle
from specjax.bench.pages.tables import (
    Grid,
    depth_table,
    histogram_table,
    main_table,
    overview,
    task_tables,
)
from specjax.bench.report import complaints, near_ties
from specjax.bench.results import read_results
from specjax.bench.summary import ALL, Measurement
from specjax.core.files import expand_user
from specjax.decoding.sampling import LOSSY, Sampling

# How the facts' names read; others are shown as they stand.
LABELS = {
    "fingerprint": "fingerprint of the weights",
    "bandwidth": "memory bandwidth (measured, median of all stages)",
    "num_prompts": "number of prompts",
    "prompts": "checksum of the prompts",
    "max_new_tokens": "new tokens at most",
    "batch": "prompts at once",
    "runs": "runs of each prompt",
    "revision": "source",
    "padded_length": "tokens that all prompts are padded to",
}


@dataclass(frozen=True)
class StagePage:
    """One temperature and size of batch."""

    name: str
    rows: Sequence[Measurement]
    sampling: Sampling

    @cached_property
    def overall(self) -> Sequence[Measurement]:
        """The rows over all tasks, or of the only one."""
        return [row for row in self.rows if row.task == self.rows[-1].task]

    @property
    def drafting(self) -> Sequence[Measurement]:
        """Those of methods whose rounds commit more than one token, if they tell."""
        return [row for row in self.overall if len(row.accepted_lengths) > 2]

    @property
    def alarms(self) -> list[str]:
        """What makes its figures worthless."""
        lossy = [LOSSY] if self.sampling.is_lossy else []
        return [f"{self.name}: {line}" for line in [*complaints(self.rows), *lossy]]

    @property
    def notes(self) -> list[str]:
        """What 16-bit arithmetic excuses."""
        return near_ties(self.rows)

    @property
    def main(self) -> Grid:
        """All figures over all tasks."""
        task = self.overall[0].task
        of_tasks = "all tasks" if task == ALL else task
        return main_table(self.overall, self.sampling, f"{self.name}, {of_tasks}")

    @property
    def tables(self) -> list[Grid]:
        """Per task, by accepted tokens, and by depth."""
        return [*task_tables(self.rows), histogram_table(self.drafting), depth_table(self.drafting)]


@dataclass(frozen=True)
class Contents:
    """All that is shown."""

    facts: Sequence[tuple[str, str]]  # about the run, the command apart
    command: str
    stages: Sequence[StagePage]
    texts: Sequence[Mapping[str, Any]]
    traces: Mapping[str, Any]
    oracle: OracleResults | None
    curves: Sequence[Curve]

    @property
    def title(self) -> str:
        """Of the pages."""
        return f"specjax bench: {dict(self.facts).get('target', 'results')}"

    @property
    def alarms(self) -> list[str]:
        """What is wrong with the figures."""
        return [line for stage in self.stages for line in stage.alarms]

    @property
    def overview(self) -> Grid | None:
        """All stages side by side, if there are several."""
        if len(self.stages) == 1:
            return None
        return overview({stage.name: stage.overall for stage in self.stages})


def read_contents(folder: Path) -> Contents:
    """What the folder of a benchmark holds.

    Raises:
        SpecjaxError: if it holds no benchmark or no rows yet, or a file is damaged.
    """
    folder = expand_user(folder)
    found = read_results(folder)
    about = dict(found.about)
    command = str(about.pop("command", ""))
    facts = [(LABELS.get(name, name), text) for name, text in _told(about)]
    stages = _stages(found.rows, about.get("verification", "coupled"))
    return Contents(
        facts,
        command,
        stages,
        found.texts,
        found.traces,
        read_oracle(folder),
        read_curves(folder),
    )


def stage_name(temperature: float, num_rows: int) -> str:
    """How a temperature and size of batch are called."""
    return f"T={temperature:g}, batch {num_rows}"


def facts_of(about: Mapping[str, Any]) -> str:
    """Facts in one line."""
    return "; ".join(f"{LABELS.get(name, name)} {text}" for name, text in _told(about))


def _stages(rows: Sequence[Measurement], verification: Any) -> list[StagePage]:
    groups: dict[tuple[float, int], list[Measurement]] = {}
    for row in rows:
        groups.setdefault((row.temperature, row.batch), []).append(row)
    return [
        StagePage(stage_name(*key), of_stage, Sampling(key[0], verification=verification))
        for key, of_stage in groups.items()
    ]


def _told(about: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """The facts that there are, as text."""
    for name, value in about.items():
        if name == "bandwidth":
            yield name, f"{value / 1e9:.1f} GB/s"
        elif name == "methods":
            yield name, ", ".join(value)
        elif isinstance(value, Mapping):
            yield name, ", ".join(f"{key} {each}" for key, each in value.items())
        elif isinstance(value, list):
            if value:
                yield name, ", ".join(map(str, value))
        elif value not in ("", None):
            yield name, str(value)
