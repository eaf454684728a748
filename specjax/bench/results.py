"""The folder of a benchmark: timed runs, so that it resumes, and their summary.

run.json         what was measured, on what, and the command
programs.jsonl   compile time and memory of each method, at each temperature and batch size
samples.jsonl    one line per trial, with a timed run of every method
bandwidth.jsonl  bytes per second that the device read meanwhile
rows.jsonl       one line per method and kind of task: `Measurement`
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

from specjax.bench.measure import Batch, Sample, TaskPrompt
from specjax.bench.summary import Measurement, Published
from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user, read_json, writable_folder
from specjax.core.folder import Record, RunFolder
from specjax.core.settings import declared_fields
from specjax.run.runner import GeneratedText, Program

RUN, PROGRAMS, SAMPLES = "run.json", "programs.jsonl", "samples.jsonl"
BANDWIDTH, ROWS = "bandwidth.jsonl", "rows.jsonl"
WRITTEN_BY_OTHERS = ("*.png", "traces.json")  # reports, benchmarks.pocket
RUN_FIELDS = ("method", "dtype", "prefill_seconds", "decode_seconds", "num_compiled")
Converted = TypeVar("Converted")


class Condition(NamedTuple):
    """The conditions of a measurement; runs under the same ones share prompts and noise."""

    temperature: float
    batch_size: int

    def __str__(self) -> str:
        return f"T={self.temperature:g}, batch {self.batch_size}"


@dataclass(frozen=True)
class Results:
    """The folder of a benchmark, open for more trials."""

    folder: RunFolder

    def programs(self, condition: Condition) -> dict[str, Program]:
        return dict(self._under(condition, PROGRAMS, _program))

    def add_program(self, condition: Condition, method: str, program: Program) -> None:
        self._append(PROGRAMS, condition, {"method": method, **program._asdict()})

    def samples(self, condition: Condition, batches: Sequence[Batch]) -> list[Sample]:
        """Returns the finished runs; `batches` are those of the benchmark."""
        trials = self._under(condition, SAMPLES, lambda line: _trial(line, batches[line["number"]]))
        return [sample for trial in trials for sample in trial]

    def add_trial(self, condition: Condition, trial: Sequence[Sample]) -> None:
        """Keeps the runs of a trial; their prompts follow from the batch's number."""
        first = trial[0]
        values = {"number": first.number, "repeat": first.repeat, "kind": first.batch[0].kind}
        values["runs"] = [_run_values(sample) for sample in trial]
        self._append(SAMPLES, condition, values)

    def bandwidth(self, condition: Condition) -> float | None:
        """Returns the median of the bytes per second that the device read."""
        speeds = self._under(condition, BANDWIDTH, _bandwidth)
        return median(speeds) if speeds else None

    def add_bandwidth(self, condition: Condition, bytes_per_second: float) -> None:
        """Keeps the bytes per second that the device has just read."""
        self._append(BANDWIDTH, condition, {"bytes_per_second": bytes_per_second})

    def write_rows(self, rows: Iterable[Measurement]) -> None:
        lines = [asdict(row) | {"identical": row.identical, "rates": row.rates} for row in rows]
        self.folder.write_records(ROWS, lines)

    def _append(self, name: str, condition: Condition, values: Mapping[str, Any]) -> None:
        self.folder.append(name, {**condition._asdict(), **values})

    def _under(
        self, condition: Condition, name: str, convert: Callable[[Record], Converted]
    ) -> list[Converted]:
        lines = self.folder.records(
            name, lambda line: [convert(line)] if _condition(line) == condition else []
        )
        return [value for values in lines for value in values]


def make_folder(folder: Path) -> Path:
    """Makes the folder of a benchmark, or opens an existing one."""
    folder = writable_folder(folder)
    others = [
        path for path in folder.iterdir() if not any(map(path.match, (".*", *WRITTEN_BY_OTHERS)))
    ]
    is_training_run = RunFolder(folder).has_run
    if others and (is_training_run or not (folder / RUN).is_file()):
        raise SpecjaxError(f"--out {folder} is not empty and holds no benchmark; name a new folder")
    return folder


def open_results(path: Path, about: Mapping[str, Any]) -> Results:
    """Opens new results, or those of an interrupted run of the same benchmark.

    `about` holds what determines the figures; run.json keeps it.
    """
    folder = RunFolder(path, RUN)
    if (path / SAMPLES).is_file():
        folder.claim(about, ignored=("command",))  # that of the first start is kept
        for name in (PROGRAMS, SAMPLES, BANDWIDTH):
            folder.truncate(name)
    else:
        folder.write_json(RUN, about)
        for name in (PROGRAMS, BANDWIDTH):
            (path / name).unlink(missing_ok=True)  # of a start that measured nothing
    return Results(folder)


@dataclass(frozen=True)
class FinishedResults:
    """The content of a folder, for reports."""

    about: Mapping[str, Any]  # run.json, and the median bandwidth
    rows: Sequence[Measurement]


def read_results(path: Path) -> FinishedResults:
    """Reads the results of a finished or interrupted benchmark."""
    folder = RunFolder(expand_user(path), RUN)
    if not folder.has_run:
        raise SpecjaxError(f"{path} holds no benchmark; run `specjax bench --out {path}` first")
    about = read_json(folder.path / RUN)
    if not isinstance(about.get("methods", {}), dict) or "bandwidth" in about:  # read below
        raise SpecjaxError(
            f"{folder.path / RUN} is not as `specjax bench` wrote it; run the benchmark again in a "
            "new folder"
        )
    rows = list(folder.records(ROWS, _row))
    if not rows:
        raise SpecjaxError(f"{path} has no results yet; repeat its command to finish it")
    if bandwidths := list(folder.records(BANDWIDTH, _bandwidth)):
        about["bandwidth"] = median(bandwidths)
    return FinishedResults(about, rows)


def read_samples(path: Path) -> dict[Condition, list[Sample]]:
    """Reads all timed runs; their batches hold the kind of task in place of the prompts."""

    def convert(line: Record) -> tuple[Condition, list[Sample]]:
        return _condition(line), _trial(line, (TaskPrompt(line["kind"], ()),))

    samples: dict[Condition, list[Sample]] = {}
    for condition, trial in RunFolder(expand_user(path)).records(SAMPLES, convert):
        samples.setdefault(condition, []).extend(trial)
    return samples


# ---- Lines of the files --------------------------------------------------------------------------


def _condition(line: Mapping[str, Any]) -> Condition:
    return Condition(line["temperature"], line["batch_size"])


def _bandwidth(line: Mapping[str, Any]) -> float:
    return float(line["bytes_per_second"])


def _program(line: Mapping[str, Any]) -> tuple[str, Program]:
    return line["method"], Program(**{name: line[name] for name in Program._fields})


def _row(line: Mapping[str, Any]) -> Measurement:
    values = {field.name: line[field.name] for field in fields(Measurement) if field.name in line}
    values["published"] = Published(**declared_fields(Published, values["published"]))
    return Measurement(**declared_fields(Measurement, values))


def _run_values(sample: Sample) -> dict[str, Any]:
    """Returns the values of a run that are kept, besides its trial."""
    texts = [
        text._asdict() | {"from_draft": "".join(map(str, map(int, text.from_draft)))}
        for text in sample.texts
    ]
    return {name: getattr(sample, name) for name in RUN_FIELDS} | {"texts": texts}


def _trial(line: Mapping[str, Any], batch: Batch) -> list[Sample]:
    trial = {"batch": batch, "number": line["number"], "repeat": line["repeat"]}
    return [
        Sample(
            **trial,
            **{name: values[name] for name in RUN_FIELDS},
            texts=tuple(_text(text) for text in values["texts"]),
        )
        for values in line["runs"]
    ]


def _text(values: Mapping[str, Any]) -> GeneratedText:
    return GeneratedText(
        tuple(values["tokens"]),
        values["rounds"],
        tuple(values["accepted_lengths"]),
        tuple(flag == "1" for flag in values["from_draft"]),
        values["accepted"],
    )
