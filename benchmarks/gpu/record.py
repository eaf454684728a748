"""The GPU report's folder, written anew with every group: gpu.json has the rows, gpu.md tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.measure import Group, Row
from benchmarks.gpu.methods import PAPER_METHODS
from benchmarks.harness import table
from specjax.core.files import read_json
from specjax.core.folder import RunFolder

ROWS, TABLES = "gpu.json", "gpu.md"
# What may differ when a report is continued.
MAY_DIFFER = ("command", "platform", "repeats", "rows", "not_measured")
METHOD = (
    "Weights are random, and accepted lengths are set by construction: each round the drafter does "
    "all its work, and then as many of its tokens are made right as the accepted length asks for. "
    "Accepted length includes the bonus token. Overhead is the time of a round over that of a "
    "plain step, measured in turn; its floor counts the bytes that must be read. Seconds are "
    "medians, with quartiles in parentheses, and leave out the prefill."
)
PUBLISHED = ("x plain as published", "at accepted length", "of")
COLUMNS = ("ms a round", "overhead", "floor", "tokens/s", "x plain")


@dataclass(frozen=True)
class Record:
    """The folder; `about` is what the figures depend on, `groups` all measurements."""

    folder: RunFolder  # whose config is `ROWS`
    about: dict[str, Any]
    groups: Sequence[Group]

    def open(self) -> None:
        """Makes the folder and writes the empty report, so that a bad folder fails at once."""
        self.folder.claim(self.about, ignored=MAY_DIFFER)
        self.add([])

    @property
    def rows(self) -> list[Row]:
        """All rows so far."""
        return read_json(self.folder.path / ROWS).get("rows", [])

    def missing(self) -> list[Group]:
        """Returns the groups that are not measured yet, with their missing methods."""
        done = {_name_of(row) for row in self.rows if "failed" not in row}
        groups = []
        for group in self.groups:
            names = [name for name in group.names if (*group.place, name) not in done]
            if names:
                methods = tuple(name for name in names if name in PAPER_METHODS)
                groups.append(group._replace(methods=methods))
        return groups

    def add(self, rows: Sequence[Row]) -> None:
        """Keeps rows, in place of those of the same name, and writes the tables anew."""
        fresh = {_name_of(row) for row in rows}
        rows = [*(row for row in self.rows if _name_of(row) not in fresh), *rows]
        measured = {_name_of(row) for row in rows}
        places = [(*group.place, name) for group in self.groups for name in group.names]
        missing = [_title(*each) for each in places if each not in measured]
        self.folder.write_json(ROWS, {**self.about, "rows": rows, "not_measured": missing})
        self.folder.write(TABLES, markdown(self.about, rows, missing))


def markdown(about: Row, rows: Sequence[Row], missing: Sequence[str]) -> str:
    """Formats the tables without empty parts, and lists missing measurements."""
    versions = ", ".join(f"{name} {value}" for name, value in about["versions"].items())
    done = [row for row in rows if "failed" not in row]
    failed = [f"{_title(*_name_of(row))}: {row['failed']}" for row in rows if "failed" in row]
    differing = [_title(*_name_of(row)) for row in done if row.get("matches_plain") is False]
    blocks = [
        "# On a GPU",
        f"`{about['command']}` at revision {about['revision'] or 'unknown'}",
        f"{about['device']}, {versions}. {about['new_tokens']} new tokens per text.",
        METHOD,
        *_bandwidth(_of(done, "bandwidth")),
        *_plain(_of(done, "plain"), _read_rate(done)),
        *_decoding("Rounds at the papers' settings", _of(done, "rounds"), True),
        *_decoding("Rows at once", _of(done, "batch"), False),
        *_decoding("Length of the prompt", _of(done, "context"), False),
        *_bullets("TOKENS DIFFER from plain decoding", differing),
        *_bullets("Failed", failed),
        *_bullets("Not measured", missing),
    ]
    return "\n\n".join(blocks) + "\n"


def _bandwidth(rows: Sequence[Row]) -> list[str]:
    names = {"copy": "copied (read and written)", "read": "read (summed up)"}
    cells = []
    for row in rows:
        low, middle, high = (rate / 1e9 for rate in row["bytes_per_second"])
        cells.append((names[row["method"]], f"{middle:.0f} ({low:.0f} to {high:.0f})"))
    return _section("Bandwidth", ("a large array", "GB/s"), cells)


def _plain(rows: Sequence[Row], read_rate: float | None) -> list[str]:
    cells = []
    for row in rows:
        rate = row["bytes_per_step"] / row["round_seconds"][1]
        cells.append(
            (
                f"{row['size']}, context {row['context']}",
                _ms(row["round_seconds"]),
                f"{row['tokens_per_second']:.1f}",
                f"{row['bytes_per_step'] / 1e9:.2f}",
                "" if read_rate is None else f"{rate / read_rate:.1%}",
                f"{row['compile_seconds']:.0f}",
            )
        )
    columns = "target", "ms a token", "tokens/s", "GB read", "of the bandwidth", "s to compile"
    return _section("Plain decoding", columns, cells)


def _decoding(title: str, rows: Sequence[Row], has_published: bool) -> list[str]:
    cells = []
    for row in sorted(rows, key=lambda row: (row["batch"], row["context"])):
        length, floor = row.get("accepted_length", 1.0), row.get("floor_overhead", 1.0)
        place = f"{row['method']}, {row['size']}, context {row['context']}, batch {row['batch']}"
        cell = [place, row.get("rows", 1), f"{length:.2f}", _ms(row["round_seconds"])]
        cell += [f"{row['overhead']:.2f}", f"{floor:.2f}", f"{row['tokens_per_second']:.1f}"]
        cell.append(f"{row['speed_over_plain']:.2f}")
        if has_published:
            source, accepted, speed = row["published"].values()
            cell += [f"{speed:.2f}", f"{accepted:.2f}", source]
        cells.append(cell)
    header = ("method", "rows", "accepted length", *COLUMNS, *PUBLISHED[: 3 * has_published])
    return _section(title, header, cells)


def _section(title: str, header: Sequence[str], cells: Sequence[Sequence[Any]]) -> list[str]:
    return [f"## {title}", table(header, cells)] if cells else []


def _bullets(title: str, items: Sequence[str]) -> list[str]:
    return [f"## {title}", "\n".join(f"- {item}" for item in items)] if items else []


def _of(rows: Sequence[Row], part: str) -> list[Row]:
    return [row for row in rows if row["part"] == part]


def _read_rate(rows: Sequence[Row]) -> float | None:
    """Returns the median of the bytes per second that were read."""
    found = [row for row in _of(rows, "bandwidth") if row["method"] == "read"]
    return found[0]["bytes_per_second"][1] if found else None


def _name_of(row: Row) -> tuple[str, str, int, int, str]:
    return row["part"], row["size"], row["context"], row["batch"], row["method"]


def _title(part: str, size: str, context: int, batch: int, method: str) -> str:
    place = f", {size}, context {context}, batch {batch}" if size else ""
    return f"{part}{place}: {method}"


def _ms(seconds: Sequence[float]) -> str:
    low, middle, high = (f"{1e3 * each:.3f}" for each in seconds)
    return f"{middle} ({low} to {high})"
