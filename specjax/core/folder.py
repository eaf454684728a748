"""The folder of a resumable run: its settings, JSON lines that grow as it goes, and a lock."""

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short_repr
from typing import Any, TypeVar

from specjax.core.errors import SpecjaxError
from specjax.core.files import read_json, readable, writable, write_whole

Record = dict[str, Any]
Converted = TypeVar("Converted")


@dataclass(frozen=True)
class RunFolder:
    """The files of one run, which may be killed at any moment and resumed.

    Several runs may share a folder if their files have different names.
    """

    path: Path
    config: str = "config.json"
    """The file that holds the settings of the run."""
    lock_file: str = ".lock"

    @property
    def has_run(self) -> bool:
        """Whether a run has claimed the folder."""
        return (self.path / self.config).exists()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Creates the folder and keeps other processes out; the lock dies with its process."""
        with writable(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / self.lock_file).open("w")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SpecjaxError(
                    f"{self.path} is in use by another run; wait until it ends, or name another "
                    "folder"
                ) from None
            except OSError:  # a file system without locks
                pass
            yield

    def claim(
        self, settings: Mapping[str, Any], resume: bool = True, ignored: Iterable[str] = ()
    ) -> None:
        """Records the settings of a new run, or checks that the run to resume has the same ones.

        The `ignored` settings may differ.
        """
        self.check_resume(resume)
        if self.has_run:
            check_same_run(self.path, read_json(self.path / self.config), settings, ignored)
        else:
            self.write_json(self.config, settings)

    def check_resume(self, resume: bool) -> None:
        """Raises SpecjaxError if the folder holds a run that should not be resumed."""
        if self.has_run and not resume:
            raise SpecjaxError(
                f"{self.path} already holds a run; add --resume to continue it, or name another "
                "folder"
            )

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        file = self.path / name
        with writable(file), file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")

    def records(
        self, name: str, convert: Callable[[Record], Converted] = dict
    ) -> Iterator[Converted]:
        """Yields the converted lines of a file; a last line that was cut off is ignored."""
        for number, line in enumerate(self._lines(name), 1):
            try:
                if not isinstance(values := json.loads(line), dict):
                    raise ValueError("not a JSON object")
                yield convert(values)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                reason = f"{type(error).__name__}: {error}"
                raise SpecjaxError(
                    f"{self.path / name}:{number} is damaged ({reason}); delete that line and run "
                    "the command again"
                ) from None

    def truncate(self, name: str, num_records: int | None = None) -> None:
        """Atomically cuts a file to its first records, or only removes a cut last line."""
        if (file := self.path / name).exists():
            with writable(file):
                os.truncate(file, sum(map(len, self._lines(name)[:num_records])))

    def write(self, name: str, text: str) -> None:
        write_whole(self.path / name, text.encode())

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Atomically replaces a file by one JSON object."""
        self.write(name, json.dumps(values, indent=1) + "\n")

    def write_records(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Atomically replaces a file of JSON lines."""
        self.write(name, "".join(json.dumps(record) + "\n" for record in records))

    def _lines(self, name: str) -> list[bytes]:
        file = self.path / name
        with readable(file):
            lines = file.read_bytes().splitlines(True) if file.exists() else []
        return lines if not lines or lines[-1].endswith(b"\n") else lines[:-1]


def check_same_run(
    place: object,
    recorded: Mapping[str, Any],
    settings: Mapping[str, Any],
    ignored: Iterable[str] = (),
) -> None:
    """Raises SpecjaxError if a run to resume had other settings; values are compared as JSON."""
    settings = json.loads(json.dumps(settings))
    if changes := [change for name, change in _changes(recorded, settings) if name not in ignored]:
        raise SpecjaxError(
            f"{place} holds another run ({', '.join(changes)}); name another folder, or delete "
            "this one"
        )


def _changes(recorded: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields name and description of the values that differ, including those of nested groups."""
    for name in {**recorded, **settings}:
        before, now = recorded.get(name), settings.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            yield from _changes(before, now)
        elif before != now:
            yield name, f"{name} was {short_repr(before)}, now {short_repr(now)}"
