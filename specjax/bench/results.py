"""The folder of a benchmark: runs as they come, so that it resumes, and what they sum up to.

run.json         what was measured, on what, and the command
programs.jsonl   what each method took to compile, at each temperature and batch size
samples.jsonl    one line per turn, with a timed run of every method
bandwidth.jsonl  bytes per second that the device read meanwhile
rows.jsonl       one line per method and kind of task: `Measurement`
texts.jsonl      the first prompt of each kind: which tokens of each method were drafted
traces.json      the parts of the rounds, if they were asked for
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

from specjax.bench.measure import Batch, Request, Sample
from specjax.bench.summary import Measurement, Published
from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user, read_json, readable, writable, writable_folder
from specjax.run.runner import GeneratedText, Program

RUN, PROGRAMS, SAMPLES = "run.json", "programs.jsonl", "samples.jsonl"
BANDWIDTH, ROWS, TEXTS = "bandwidth.jsonl", "rows.jsonl", "texts.jsonl"
TRACES = "traces.json"
COMMAND = "command"  # of run.json: that of the first start is kept
WRITTEN_BY_OTHERS = ("*.png", "curves.jsonl")  # the report shows these too
RUN_FIELDS = ("method", "dtype", "prefill_seconds", "decode_seconds", "num_compiled")
TEXT_FIELDS = ("temperature", "num_rows", "method", "kind", "prompt", "pieces", "from_draft")
Made = TypeVar("Made")
Convert = Callable[[dict[str, Any]], Made]


class Stage(NamedTuple):
    """Runs that are measured together: they share prompts, noise and batch size."""

    temperature: float
    num_rows: int

    def __str__(self) -> str:
        return f"T={self.temperature:g}, batch {self.num_rows}"


@dataclass(frozen=True)
class Results:
    """The folder, open for more turns of one benchmark."""

    folder: Path

    def programs(self, stage: Stage) -> dict[str, Program]:
        """Returns what is known of the methods' programs."""
        return dict(self._of_stage(PROGRAMS, stage, _program))

    def add_programs(self, stage: Stage, programs: Mapping[str, Program]) -> None:
        """Keeps what each method took to compile."""
        for method, program in programs.items():
            self._append(PROGRAMS, stage, {"method": method, **program._asdict()})

    def samples(self, stage: Stage, batches: Sequence[Batch]) -> list[Sample]:
        """Returns the finished runs; `batches` are those of the benchmark."""
        turns = self._of_stage(SAMPLES, stage, lambda line: _turn(line, batches[line["number"]]))
        return [sample for turn in turns for sample in turn]

    def add_turn(self, stage: Stage, turn: Sequence[Sample]) -> None:
        """Keeps the runs of one turn at once; the prompts are known by the batch's number."""
        first = turn[0]
        values = {"number": first.number, "repeat": first.repeat, "kind": first.batch[0].kind}
        self._append(SAMPLES, stage, values | {"runs": [_run_values(each) for each in turn]})

    def bandwidth(self, stage: Stage) -> float | None:
        """Returns the median of the bytes per second that the device read during the stage."""
        found = self._of_stage(BANDWIDTH, stage, _bandwidth)
        return median(found) if found else None

    def add_bandwidth(self, stage: Stage, bytes_per_second: float) -> None:
        """Keeps what the device has just read."""
        self._append(BANDWIDTH, stage, {"bytes_per_second": bytes_per_second})

    def write_rows(self, rows: Iterable[Measurement]) -> None:
        """Replaces the rows."""
        lines = [asdict(row) | {"identical": row.identical, "rates": row.rates} for row in rows]
        replace_lines(self.folder / ROWS, lines)

    def write_texts(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Replaces the texts."""
        replace_lines(self.folder / TEXTS, lines)

    @property
    def has_traces(self) -> bool:
        """Whether the parts of the rounds have been timed."""
        return (self.folder / TRACES).is_file()

    def write_traces(self, values: Mapping[str, Any]) -> None:
        """Keeps the parts of the rounds."""
        _write(self.folder / TRACES, json.dumps(values, indent=1) + "\n")

    def _append(self, name: str, stage: Stage, values: Mapping[str, Any]) -> None:
        path = self.folder / name
        with writable(path), path.open("a", encoding="utf-8") as file:
            print(json.dumps({**stage._asdict(), **values}), file=file, flush=True)

    def _of_stage(self, name: str, stage: Stage, convert: Convert[Made]) -> list[Made]:
        found = _converted(
            self.folder / name, lambda line: [convert(line)] if _stage(line) == stage else []
        )
        return [value for values in found for value in values]


def make_folder(folder: Path) -> Path:
    """Makes the folder of a benchmark, or opens an existing one.

    Raises:
        SpecjaxError: if it cannot be written, or holds something else.
    """
    folder = writable_folder(folder)
    others = [
        path for path in folder.iterdir() if not any(map(path.match, (".*", *WRITTEN_BY_OTHERS)))
    ]
    if others and not (folder / RUN).is_file():
        raise SpecjaxError(f"--out {folder} holds something else; name a new folder")
    return folder


def open_results(folder: Path, about: Mapping[str, Any]) -> Results:
    """Opens new results, or those of an interrupted run of the same benchmark.

    A last line that was cut off in the middle is removed.

    Args:
        folder: from `make_folder`.
        about: what decides the figures; it is kept in run.json.

    Raises:
        SpecjaxError: if the folder holds another benchmark.
    """
    path = folder / RUN
    now = json.loads(json.dumps(about))
    if (folder / SAMPLES).is_file():
        before = read_json(path)
        for name in {**before, **now}:
            if name != COMMAND and before.get(name) != now.get(name):
                raise SpecjaxError(
                    f"{folder} holds another benchmark ({name} was {before.get(name)!r}, now "
                    f"{now.get(name)!r}); name another folder, or delete this one"
                )
        for name in (PROGRAMS, SAMPLES, BANDWIDTH):
            _drop_cut_line(folder / name)
        return Results(folder)
    _write(path, json.dumps(now, indent=1) + "\n")
    for name in (PROGRAMS, BANDWIDTH, TRACES):
        (folder / name).unlink(missing_ok=True)  # of a start that measured nothing
    return Results(folder)


@dataclass(frozen=True)
class FinishedResults:
    """The content of a folder, for those who only read it."""

    about: Mapping[str, Any]  # run.json, and the bandwidth: the median over all stages
    rows: Sequence[Measurement]
    texts: Sequence[Mapping[str, Any]]
    traces: Mapping[str, Any]


def read_results(folder: Path) -> FinishedResults:
    """Reads what a finished or interrupted benchmark has left.

    Raises:
        SpecjaxError: if there is no such benchmark, it has no rows yet, or a file is damaged.
    """
    folder = expand_user(folder)
    if not (folder / RUN).is_file():
        raise SpecjaxError(f"{folder} holds no benchmark; run `specjax bench --out {folder}` first")
    about = read_json(folder / RUN)
    rows = list(_converted(folder / ROWS, _row))
    if not rows:
        raise SpecjaxError(f"{folder} has no results yet; repeat its command to finish it")
    traces = read_json(folder / TRACES) if (folder / TRACES).is_file() else {}
    if traces and not {"temperature", "methods"} <= set(traces):
        raise SpecjaxError(f"{folder / TRACES} is damaged; delete it and repeat the command")
    texts = _converted(folder / TEXTS, lambda line: {name: line[name] for name in TEXT_FIELDS})
    if bandwidths := list(_converted(folder / BANDWIDTH, _bandwidth)):
        about["bandwidth"] = median(bandwidths)
    return FinishedResults(about, rows, list(texts), traces)


def read_samples(folder: Path) -> dict[Stage, list[Sample]]:
    """Reads all timed runs; their batches hold the kind of task in place of the prompts.

    Raises:
        SpecjaxError: if the file is damaged.
    """

    def convert(line: dict[str, Any]) -> tuple[Stage, list[Sample]]:
        return _stage(line), _turn(line, (Request(line["kind"], ()),))

    found: dict[Stage, list[Sample]] = {}
    for stage, turn in _converted(expand_user(folder) / SAMPLES, convert):
        found.setdefault(stage, []).extend(turn)
    return found


def replace_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Writes a file of JSON lines in one step."""
    _write(path, "".join(json.dumps(line) + "\n" for line in lines))


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file of JSON lines; none if there is no file.

    Raises:
        SpecjaxError: with file and line, for a line that is no JSON object.
    """
    if not path.exists():
        return
    with readable(path):
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            values, reason = json.loads(line), "it is no JSON object"
        except ValueError as error:
            values, reason = None, str(error)
        if not isinstance(values, dict):
            raise _damaged(path, number, reason)
        yield values


def _converted(path: Path, convert: Convert[Made]) -> Iterator[Made]:
    """Yields `convert` of every line; an error names the line."""
    for number, line in enumerate(read_lines(path), 1):
        try:
            yield convert(line)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise _damaged(path, number, f"{type(error).__name__}: {error}") from None


def _damaged(path: Path, number: int, reason: str) -> SpecjaxError:
    return SpecjaxError(
        f"{path}:{number} is damaged ({reason}); delete this line and measure again"
    )


def _write(path: Path, text: str) -> None:
    """Writes all or nothing: the process may be killed meanwhile."""
    partial = path.with_name(f".{path.name}")
    with writable(path):
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)


def _drop_cut_line(path: Path) -> None:
    if path.is_file():
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):
            path.write_bytes(content[: content.rfind(b"\n") + 1])


def _stage(line: Mapping[str, Any]) -> Stage:
    return Stage(line["temperature"], line["num_rows"])


def _bandwidth(line: Mapping[str, Any]) -> float:
    return float(line["bytes_per_second"])


def _program(line: Mapping[str, Any]) -> tuple[str, Program]:
    return line["method"], Program(**{name: line[name] for name in Program._fields})


def _row(line: Mapping[str, Any]) -> Measurement:
    values: dict[str, Any] = {field.name: line[field.name] for field in fields(Measurement)}
    for name, value in values.items():
        values[name] = tuple(value) if isinstance(value, list) else value
    for name in ("ratio", "tokens_per_second", "mean_accepted_length", "temperature", "batch"):
        float(values[name])  # a TypeError is reported with its line
    values["published"] = Published(**values["published"])
    return Measurement(**values)


def _run_values(sample: Sample) -> dict[str, Any]:
    """Returns the values of one run that are kept, besides its turn."""
    texts = [
        text._asdict() | {"from_draft": "".join(map(str, map(int, text.from_draft)))}
        for text in sample.texts
    ]
    return {name: getattr(sample, name) for name in RUN_FIELDS} | {"texts": texts}


def _turn(line: Mapping[str, Any], batch: Batch) -> list[Sample]:
    turn = {"batch": batch, "number": line["number"], "repeat": line["repeat"]}
    return [
        Sample(
            **turn,
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
