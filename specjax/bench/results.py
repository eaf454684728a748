"""The folder of a benchmark: runs as they come, so that a killed one resumes, and what they show.

run.json         what was measured, on what, and the command
programs.jsonl   what it took to compile each method, at each temperature and size of batch
samples.jsonl    one line per timed run
bandwidth.jsonl  what the device read per second meanwhile
rows.jsonl       one line per method and kind of task: `Measurement`
texts.jsonl      of the first prompt of each kind, how each token of each method came
traces.json      the parts of the rounds, where they were asked for
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

from specjax.bench.measure import Batch, Program, Sample, Text
from specjax.bench.summary import Measurement
from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user, read_json, readable, writable, writable_folder

RUN, PROGRAMS, SAMPLES = "run.json", "programs.jsonl", "samples.jsonl"
BANDWIDTH, ROWS, TEXTS = "bandwidth.jsonl", "rows.jsonl", "texts.jsonl"
TRACES = "traces.json"
COMMAND = "command"  # of run.json: the first start decides
WRITTEN_BY_OTHERS = ("*.png", "curves.jsonl", "oracle.json")  # what a report shows beside these


TEXT_FIELDS = ("temperature", "num_rows", "method", "kind", "prompt", "pieces", "from_draft")
Made = TypeVar("Made")


class Stage(NamedTuple):
    """What is measured together: its methods share prompts, noise and size of batch."""

    temperature: float
    num_rows: int


@dataclass(frozen=True)
class Results:
    """The folder, open for more runs of one benchmark."""

    folder: Path

    def programs(self, stage: Stage) -> dict[str, Program]:
        """What is known of the methods' programs."""
        found = _converted(self.folder / PROGRAMS, _program)
        return {method: program for of_stage, method, program in found if of_stage == stage}

    def add_programs(self, stage: Stage, programs: Mapping[str, Program]) -> None:
        """Keeps what it took to compile each method."""
        for method, program in programs.items():
            self._append(PROGRAMS, {**stage._asdict(), "method": method, **program._asdict()})

    def samples(self, stage: Stage, batches: Sequence[Batch]) -> list[Sample]:
        """The runs that were finished; `batches` are those of the run."""

        def convert(line: Mapping[str, Any]) -> Sample | None:
            return _sample(line, batches) if _stage(line) == stage else None

        return [each for each in _converted(self.folder / SAMPLES, convert) if each is not None]

    def drop_partial_turns(self, stage: Stage, methods: Iterable[str]) -> None:
        """Takes away the runs of turns that not all methods had: pairs come from one start."""
        found: dict[tuple[Stage, int, int], set[str]] = {}
        lines = list(_converted(self.folder / SAMPLES, lambda line: (_turn(line), line)))
        for turn, line in lines:
            found.setdefault(turn, set()).add(line["method"])
        partial = {turn for turn in found if turn[0] == stage and found[turn] < set(methods)}
        if partial:
            kept = [line for turn, line in lines if turn not in partial]
            replace_lines(self.folder / SAMPLES, kept)

    def add_sample(self, stage: Stage, sample: Sample) -> None:
        """Keeps one run, at once."""
        self._append(SAMPLES, {**stage._asdict(), **_values(sample)})

    def bandwidth(self, stage: Stage) -> float | None:
        """Bytes per second that the device read while the stage was measured: the median."""
        found = [value for of_stage, value in _bandwidths(self.folder) if of_stage == stage]
        return median(found) if found else None

    def add_bandwidth(self, stage: Stage, bytes_per_second: float) -> None:
        """Keeps what the device has just read."""
        self._append(BANDWIDTH, {**stage._asdict(), "bytes_per_second": bytes_per_second})

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

    def _append(self, name: str, values: Mapping[str, Any]) -> None:
        path = self.folder / name
        with writable(path), path.open("a", encoding="utf-8") as file:
            print(json.dumps(values), file=file, flush=True)


def make_folder(folder: Path) -> Path:
    """The folder, which can be written to and holds nothing but a benchmark's results.

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
    """The results in `folder`: new ones, or those of a run of the same that was stopped.

    A last line that was cut off in the middle is taken away.

    Args:
        folder: that of `make_folder`.
        about: what decides the figures; it is kept in run.json.

    Raises:
        SpecjaxError: if the folder holds another benchmark.
    """
    path = folder / RUN
    now = json.loads(json.dumps(about))
    if (folder / SAMPLES).is_file():
        before = read_json(path)
        others = [
            name
            for name in {**before, **now}
            if name != COMMAND and before.get(name) != now.get(name)
        ]
        if others:
            name = others[0]
            raise SpecjaxError(
                f"{folder} holds another benchmark ({name} was {before.get(name)!r}, now "
                f"{now.get(name)!r}); name another folder, or delete this one"
            )
        for name in (PROGRAMS, SAMPLES, BANDWIDTH):
            _drop_cut_line(folder / name)
        return Results(folder)
    _write(path, json.dumps(now, indent=1) + "\n")
    for name in (PROGRAMS, BANDWIDTH):
        (folder / name).unlink(missing_ok=True)  # of a start that measured nothing
    return Results(folder)


@dataclass(frozen=True)
class Found:
    """What a folder holds for those who only read."""

    about: Mapping[str, Any]  # run.json, and the bandwidth: the median over all stages
    rows: Sequence[Measurement]
    texts: Sequence[Mapping[str, Any]]
    traces: Mapping[str, Any]


def read_results(folder: Path) -> Found:
    """What a finished or interrupted benchmark has left.

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
    if bandwidths := [value for _, value in _bandwidths(folder)]:
        about["bandwidth"] = median(bandwidths)
    return Found(about, rows, list(texts), traces)


def replace_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Writes a file of JSON lines in one step."""
    _write(path, "".join(json.dumps(line) + "\n" for line in lines))


def _write(path: Path, text: str) -> None:
    """Whole or not at all: a process may be killed while it writes."""
    partial = path.with_name(f".{path.name}")
    with writable(path):
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; none if there is no file.

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
            values = json.loads(line)
        except ValueError as error:
            values, reason = None, str(error)
        else:
            reason = "it is no JSON object"
        if not isinstance(values, dict):
            raise SpecjaxError(
                f"{path}:{number} is damaged ({reason}); delete this line and measure again"
            )
        yield values


def _converted(path: Path, convert: Callable[[dict[str, Any]], Made]) -> Iterator[Made]:
    """Every line as `convert` makes it; one that it cannot is told."""
    for number, line in enumerate(read_lines(path), 1):
        try:
            yield convert(line)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise SpecjaxError(
                f"{path}:{number} is damaged ({type(error).__name__}: {error}); delete this line "
                "and measure again"
            ) from None


def _drop_cut_line(path: Path) -> None:
    if path.is_file():
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):
            path.write_bytes(content[: content.rfind(b"\n") + 1])


def _stage(line: Mapping[str, Any]) -> Stage:
    return Stage(line["temperature"], line["num_rows"])


def _turn(line: Mapping[str, Any]) -> tuple[Stage, int, int]:
    return _stage(line), line["number"], line["repeat"]


def _bandwidths(folder: Path) -> Iterator[tuple[Stage, float]]:
    return _converted(
        folder / BANDWIDTH, lambda line: (_stage(line), float(line["bytes_per_second"]))
    )


def _program(line: Mapping[str, Any]) -> tuple[Stage, str, Program]:
    return (
        _stage(line),
        line["method"],
        Program(**{name: line[name] for name in Program._fields}),
    )


def _row(line: Mapping[str, Any]) -> Measurement:
    values: dict[str, Any] = {field.name: line[field.name] for field in fields(Measurement)}
    for name, value in values.items():
        values[name] = tuple(value) if isinstance(value, list) else value
    for name in ("ratio", "tokens_per_second", "mean_accepted_length", "temperature", "batch"):
        float(values[name])  # a TypeError tells of the line
    return Measurement(**values)


def _values(sample: Sample) -> dict[str, Any]:
    """A run in JSON's terms; the prompts are known by the number of the batch."""
    texts = [
        text._asdict() | {"from_draft": "".join(map(str, map(int, text.from_draft)))}
        for text in sample.texts
    ]
    return sample._asdict() | {"batch": sample.batch[0].kind, "texts": texts}


def _sample(line: Mapping[str, Any], batches: Sequence[Batch]) -> Sample:
    texts = [
        Text(
            tuple(text["tokens"]),
            text["rounds"],
            tuple(text["accepted_lengths"]),
            tuple(flag == "1" for flag in text["from_draft"]),
        )
        for text in line["texts"]
    ]
    values = {name: line[name] for name in Sample._fields}
    return Sample(**values | {"batch": batches[line["number"]], "texts": tuple(texts)})
