"""The GPU report as Markdown and as a figure, drawn from whatever rows there are."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]
ROUND_COLUMNS = (
    *("method", "rows", "accepted length", "ms a round", "overhead", "floor"),
    *("tokens/s", "x plain", "x plain as published", "at accepted length", "of"),
)
HOW = (
    "Weights are random, and accepted lengths are set by construction: each round the drafter does "
    "all its work, and then as many of its tokens are made right as the accepted length asks for. "
    "Accepted length counts the bonus token. Overhead is the time of a round over that of a plain "
    "step, measured in turn; its floor counts the bytes that must be read. Seconds are medians, "
    "with quartiles in parentheses."
)


def markdown(about: Row, rows: Sequence[Row], missing: Sequence[str]) -> str:
    """The tables; parts of which nothing is known are left out, and what is missing is listed."""
    versions = ", ".join(f"{name} {value}" for name, value in about["versions"].items())
    done = [row for row in rows if "failed" not in row]
    blocks = [
        "# GPU report",
        f"`{about['command']}`",
        f"{about['device']}, {versions}. {about['new_tokens']} new tokens per text.",
        HOW,
        *_bandwidth(done),
        *_plain(done),
        *_rounds(done),
        *_in_series(done, "batch", "Rows at once"),
        *_in_series(done, "context", "Length of the prompt"),
        *_differing(done),
        *_listed("Failed", [f"{_where(row)}: {row['failed']}" for row in rows if "failed" in row]),
        *_listed("Not measured", missing),
    ]
    return "\n\n".join(blocks) + "\n"


def draw(rows: Sequence[Row]) -> "Figure":
    """Round overhead with its floor, and plain decoding's share of the bandwidth."""
    from matplotlib.figure import Figure

    done = [row for row in rows if "failed" not in row]
    rounds, plain = _of(done, "rounds"), _of(done, "plain")
    height = 1.6 + 0.4 * max(len(rounds), len(plain), 2)
    figure = Figure(figsize=(12, height), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _bars(left, [_label(row) for row in rounds], [row["overhead"] for row in rounds])
    floors = [row["floor_overhead"] for row in rounds]
    places = range(len(floors))
    left.plot(floors, places, "k|", markersize=18, markeredgewidth=2.5, label="floor: bytes read")
    left.set_xlabel("time of a round / plain step")
    if floors:
        left.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    read = _read_rate(done)
    shares = [100 * share for row in plain if (share := _share(row, read)) is not None]
    _bars(right, [row["size"] for row in plain][: len(shares)], shares)
    right.axvline(100, color="black", linewidth=1)
    right.set_xlabel("plain decoding: % of the measured bandwidth")
    return figure


def _bars(axes: "Axes", labels: Sequence[str], values: Sequence[float]) -> None:
    places = range(len(labels))
    axes.barh(places, values, height=0.6, facecolor="0.85", edgecolor="black", hatch="//")
    for place, value in zip(places, values, strict=True):
        box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
        axes.text(value / 2, place, f"{value:.2f}", ha="center", va="center", fontsize=8, bbox=box)
    axes.set_yticks(places, labels)
    axes.invert_yaxis()


def _bandwidth(rows: Sequence[Row]) -> list[str]:
    told = {"copy": "copied (read and written)", "read": "read (summed up)"}
    cells = []
    for row in _of(rows, "bandwidth"):
        low, middle, high = (rate / 1e9 for rate in row["bytes_per_second"])
        cells.append((told[row["method"]], f"{middle:.0f} ({low:.0f} to {high:.0f})"))
    return _table("Bandwidth", ("a large array", "GB/s"), cells)


def _plain(rows: Sequence[Row]) -> list[str]:
    read, cells = _read_rate(rows), []
    for row in _of(rows, "plain"):
        share = _share(row, read)
        cells.append(
            (
                f"{row['size']}, context {row['context']}",
                _ms(row["step_seconds"]),
                f"{row['tokens_per_second']:.1f}",
                f"{row['bytes_per_step'] / 1e9:.2f}",
                "" if share is None else f"{share:.1%}",
                f"{row['compile_seconds']:.0f}",
            )
        )
    columns = "target", "ms a token", "tokens/s", "GB read", "of the bandwidth", "s to compile"
    return _table("Plain decoding", columns, cells)


def _rounds(rows: Sequence[Row]) -> list[str]:
    found = _of(rows, "rounds")
    cells = [
        (
            row["method"],
            row["rows"],
            f"{row['accepted_length']:.2f}",
            _ms(row["round_seconds"]),
            f"{row['overhead']:.2f}",
            f"{row['floor_overhead']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['speed_over_plain']:.2f}",
            f"{row['published']['speed_over_plain']:.2f}",
            f"{row['published']['accepted_length']:.2f}",
            row["published"]["source"],
        )
        for row in found
    ]
    where = f" ({found[0]['size']}, context {found[0]['context']})" if found else ""
    return _table(f"Rounds at the papers' settings{where}", ROUND_COLUMNS, cells)


def _in_series(rows: Sequence[Row], part: str, title: str) -> list[str]:
    """A table of what grows: rows at once, or the prompt."""
    cells = []
    for row in sorted(_of(rows, part), key=lambda row: row[part]):
        is_plain = "step_seconds" in row
        label = row["method"] if is_plain else _label(row)
        own = (
            _ms(row["step_seconds" if is_plain else "round_seconds"]),
            "1.00" if is_plain else f"{row['overhead']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            "1.00" if is_plain else f"{row['speed_over_plain']:.2f}",
        )
        cells.append((row[part], label, *own))
    columns = part, "method", "ms a round", "overhead", "tokens/s of all rows", "x plain"
    return _table(title, columns, cells)


def _differing(rows: Sequence[Row]) -> list[str]:
    """What a lossless method must never show."""
    found = [_where(row) for row in rows if row.get("says_what_plain_says") is False]
    return _listed("TOKENS DIFFER from plain decoding", found)


def _table(title: str, columns: Sequence[str], cells: Sequence[Sequence[Any]]) -> list[str]:
    if not cells:
        return []
    lines = [columns, ["---"] * len(columns), *cells]
    return [f"## {title}", "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)]


def _listed(title: str, items: Iterable[str]) -> list[str]:
    lines = "\n".join(f"- {item}" for item in items)
    return [f"## {title}", lines] if lines else []


def _of(rows: Sequence[Row], part: str) -> list[Row]:
    return [row for row in rows if row["part"] == part]


def _read_rate(rows: Sequence[Row]) -> float | None:
    """Bytes per second that were read, the median."""
    rates = [
        row["bytes_per_second"][1] for row in _of(rows, "bandwidth") if row["method"] == "read"
    ]
    return rates[0] if rates else None


def _share(row: Row, read: float | None) -> float | None:
    return None if read is None else row["bytes_per_step"] / row["step_seconds"][1] / read


def _label(row: Row) -> str:
    return f"{row['method']}, accepted {row['accepted_length']:.2f}"


def _where(row: Row) -> str:
    where = (
        f", {row['size']}, context {row['context']}, batch {row['batch']}" if row["size"] else ""
    )
    return f"{row['part']}{where}: {row['method']}"


def _ms(seconds: Sequence[float]) -> str:
    low, middle, high = (f"{1e3 * each:.3f}" for each in seconds)
    return f"{middle} ({low} to {high})"
