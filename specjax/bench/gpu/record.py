"""What the GPU report keeps: the time that is left, and the folder whose rows come one by one.

gpu.jsonl      the rows, as they come
gpu.json       all of them, and what they depend on
gpu.md         tables
gpu.png        figures
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax.bench.gpu.methods import METHODS
from specjax.bench.gpu.parts import Group, Row
from specjax.bench.gpu.tables import draw, markdown
from specjax.core.errors import SpecjaxError
from specjax.core.files import read_json, writable

ROWS, WHOLE, TABLES, FIGURE = "gpu.jsonl", "gpu.json", "gpu.md", "gpu.png"


class Budget:
    """The time that is left, and whether another group of some part is likely to fit into it."""

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._end = clock() + 60 * minutes
        self._longest: dict[str, float] = {}  # seconds of a group, by part

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - self._clock()

    def allows(self, part: str) -> bool:
        """Whether there is time for as long a group of this part as there has been."""
        return self.left > self._longest.get(part, 0.0)

    def spent(self, part: str, seconds: float) -> None:
        """Takes down what a group has taken."""
        self._longest[part] = max(seconds, self._longest.get(part, 0.0))

    def say(self, told: str) -> None:
        """A line on stderr, with the minutes that are left."""
        print(f"[{self.left / 60:.1f} min left] {told}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Record:
    """The folder: rows are appended when they are known, and the tables follow.

    `about` is what the figures depend on, `groups` is all that was asked for.
    """

    folder: Path
    about: dict[str, Any]
    groups: Sequence[Group]

    def open(self) -> None:
        """Makes the folder and writes what there is, so that nothing is measured in vain.

        Raises:
            SpecjaxError: if the folder cannot be written, or holds the report of another machine.
        """
        with writable(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        whole = self.folder / WHOLE
        if whole.exists():
            before = read_json(whole)
            for name in ("device", "versions", "new_tokens"):
                if before.get(name) != self.about[name]:
                    raise SpecjaxError(
                        f"{self.folder} holds a report of other {name} ({before.get(name)}, now "
                        f"{self.about[name]}); name another folder"
                    )
        self.add([])

    @property
    def rows(self) -> list[Row]:
        """All so far; of those of the same name the last."""
        path, found = self.folder / ROWS, {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the process was killed while it wrote
            name = _name_of(row)
            if "failed" not in row:
                found.pop((name, None), None)  # it had failed as a whole
            source = (row.get("published") or {}).get("source")
            found[name, source] = row
        return list(found.values())

    def missing(self) -> list[Group]:
        """The groups that are not measured yet, with those of their methods that are not."""
        done = {_name_of(row) for row in self.rows if "failed" not in row}
        groups = []
        for group in self.groups:
            names = [name for name in group.names if (*group.where, name) not in done]
            if names:
                groups.append(group._replace(methods=tuple(n for n in names if n in METHODS)))
        return groups

    def add(self, rows: Sequence[Row]) -> None:
        """Keeps rows, and writes the tables anew."""
        path = self.folder / ROWS
        with writable(path), path.open("ab+") as file:
            if file.tell():
                file.seek(-1, 2)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
        self._write(self.rows)

    def _write(self, rows: Sequence[Row]) -> None:
        known = {_name_of(row) for row in rows}
        wanted = [(*group.where, name) for group in self.groups for name in group.names]
        missing = [_title(*each) for each in wanted if each not in known]
        whole = {**self.about, "rows": rows, "not_measured": missing}
        with writable(self.folder):
            text = json.dumps(whole, indent=1) + "\n"
            (self.folder / WHOLE).write_text(text, encoding="utf-8")
            text = markdown(self.about, rows, missing)
            (self.folder / TABLES).write_text(text, encoding="utf-8")
            draw(rows).savefig(self.folder / FIGURE, dpi=120)


def _name_of(row: Row) -> tuple[str, str, int, int, str]:
    return row["part"], row["size"], row["context"], row["batch"], row["method"]


def _title(part: str, size: str, context: int, batch: int, method: str) -> str:
    where = f", {size}, context {context}, batch {batch}" if size else ""
    return f"{part}{where}: {method}"
