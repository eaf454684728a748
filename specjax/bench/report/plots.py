"""The charts of a report, in shades of grey with hatching, markers and line styles."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specjax.bench.results import Curve
from specjax.bench.rounds import PARTS
from specjax.bench.summary import Measurement
from specjax.core.files import writable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL = 2.7, 1.9  # inches, of one method among many
PANELS_PER_ROW = 4
BAR: dict[str, Any] = {"facecolor": "0.85", "edgecolor": "black", "linewidth": 0.7}
LINES: tuple[dict[str, Any], ...] = (
    {"color": "black", "marker": "o", "linestyle": "-"},
    {"color": "black", "marker": "s", "linestyle": "--", "markerfacecolor": "white"},
    {"color": "black", "marker": "^", "linestyle": ":"},
    {"color": "black", "marker": "D", "linestyle": "-.", "markerfacecolor": "white"},
    {"color": "black", "marker": "x", "linestyle": "-"},
    {"color": "black", "marker": "v", "linestyle": "--"},
)
PART_STYLES: dict[str, dict[str, Any]] = {
    "draft": {"facecolor": "white", "hatch": "////", "edgecolor": "black"},
    "verify": {"facecolor": "0.55", "edgecolor": "black"},
    "rest": {"facecolor": "white", "edgecolor": "black"},
    "plain": {"facecolor": "0.85", "hatch": "..", "edgecolor": "0.4"},
}
PART_NAMES = {"rest": "commit, update", "plain": "plain step"}
BAR_HEIGHT = 0.7


def speeds(rows: Sequence[Measurement]) -> "Figure":
    """Draws a bar per method: its speed over plain's, with quartiles; hatched if slower."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 0.6 + 0.28 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for place, row in enumerate(rows):
        hatch = "" if row.ratio >= 1 else "////"
        axes.barh(place, row.ratio, height=BAR_HEIGHT, hatch=hatch, **BAR)
        axes.plot(row.ratio_quartiles, (place, place), color="black", marker="|", linewidth=1.2)
    axes.axvline(1, color="black", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(rows)), [row.method for row in rows], fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("speed over plain decoding, with quartiles", fontsize=8)
    return figure


def histograms(rows: Sequence[Measurement]) -> "Figure":
    """Draws a panel per method: the shares of rounds by committed tokens."""
    top = max(shares.max(initial=0) for shares in map(_shares, rows))
    figure, panels = _panels(len(rows))
    for axes, row in zip(panels, rows, strict=True):
        shares = _shares(row)
        axes.bar(range(1, len(shares) + 1), shares, width=0.9, **BAR)
        axes.axvline(row.mean_accepted_length, color="black", linestyle="--", linewidth=1)
        title = f"{row.method}, mean {row.mean_accepted_length:.2f}"
        _finish(axes, title, "tokens of a round", "share of rounds", len(shares))
        axes.set_ylim(0, 1.05 * top)
    return figure


def _shares(row: Measurement) -> np.ndarray:
    counts = np.trim_zeros(np.asarray(row.accepted_lengths[1:], float), "b")
    return counts / max(counts.sum(), 1)


def rates(rows: Sequence[Measurement]) -> "Figure":
    """Draws a panel per method: the acceptance rate at every depth."""
    figure, panels = _panels(len(rows))
    for axes, row in zip(panels, rows, strict=True):
        depths, size = range(1, len(row.rates) + 1), 4 if len(row.rates) <= 20 else 2
        axes.plot(depths, row.rates, markersize=size, linewidth=1, **LINES[0])
        _finish(axes, row.method, "depth", "accepted", len(row.rates))
        axes.set_ylim(-0.04, 1.04)
    return figure


def rounds_over_time(methods: Sequence[Mapping[str, Any]]) -> "Figure":
    """Draws rounds of each method, and below them plain decoding's steps for the same tokens.

    `methods` are those of traces.json, plain decoding first. Bars are as long as the medians; the
    number on a round is how many tokens it committed (ParallelSpec, figures 1 and 5).
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    plain, *others = methods
    figure = Figure(figsize=(10, 1.2 + 1.2 * len(others)), layout="constrained")
    axes = figure.add_subplot()
    labels = []
    for method in others:
        _draw_rounds(axes, len(labels), method)
        labels.append(method["method"])
        num_tokens = sum(method["excerpt"])
        _draw_steps(axes, len(labels), 1e3 * plain["round_seconds"], num_tokens)
        labels.append(f"plain, {num_tokens} tokens")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    handles = [
        Patch(label=PART_NAMES.get(name, name), **style) for name, style in PART_STYLES.items()
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return figure


def _draw_rounds(axes: "Axes", row: int, method: Mapping[str, Any]) -> None:
    length = 1e3 * method["round_seconds"]
    place, offset = (row - BAR_HEIGHT / 2, BAR_HEIGHT), 0.0
    for part in PARTS:
        width = 1e3 * method[f"{part}_seconds"]
        bars = [(number * length + offset, width) for number in range(len(method["excerpt"]))]
        axes.broken_barh(bars, place, linewidth=0.8, label=part, **PART_STYLES[part])
        offset += width
    middle = 1e3 * (method["draft_seconds"] + method["verify_seconds"] / 2)
    for number, num_tokens in enumerate(method["excerpt"]):
        box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
        text = {"ha": "center", "va": "center", "fontsize": 8, "bbox": box}
        axes.text(number * length + middle, row, f"+{num_tokens}", **text)


def _draw_steps(axes: "Axes", row: int, length: float, num_steps: int) -> None:
    bars = [(number * length, length) for number in range(num_steps)]
    place = row - BAR_HEIGHT / 2, BAR_HEIGHT
    axes.broken_barh(bars, place, linewidth=0.8, label="plain", **PART_STYLES["plain"])


def curve(swept: Curve) -> "Figure":
    """Draws accepted length and tokens per second over a setting, one line per series."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 3), layout="constrained")
    lengths, tokens = figure.subplots(1, 2)
    for number, (name, points) in enumerate(swept.series.items()):
        values = [str(point.value) for point in points]
        style: dict[str, Any] = {"label": name, "markersize": 5, "linewidth": 1}
        style |= LINES[number % len(LINES)]
        lengths.plot(values, [point.accepted_length for point in points], **style)
        tokens.plot(values, [point.tokens_per_second for point in points], **style)
    for axes, label in ((lengths, "accepted length"), (tokens, "tokens/s")):
        axes.set(xlabel=swept.setting, ylabel=label)
        axes.grid(axis="y", color="0.85", linewidth=0.6)
        axes.legend(fontsize=8, facecolor="white", edgecolor="0.4", framealpha=1)
    return figure


def _panels(count: int) -> "tuple[Figure, list[Axes]]":
    from matplotlib.figure import Figure

    columns = min(count, PANELS_PER_ROW)
    lines = -(-count // columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * lines), layout="constrained")
    axes = np.ravel(figure.subplots(lines, columns, squeeze=False))
    for spare in axes[count:]:
        spare.remove()
    return figure, list(axes[:count])


def _finish(axes: "Axes", title: str, xlabel: str, ylabel: str, last: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, fontsize=9)
    axes.set_xlabel(xlabel, fontsize=8)
    axes.set_ylabel(ylabel, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.set_xlim(0.3, max(last, 2) + 0.7)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color="0.85", linewidth=0.6)


def save_png(figure: "Figure", folder: Path, name: str) -> Path:
    """Writes a chart to a file named after it, and returns its path."""
    path = folder / (re.sub(r"[^\w.]+", "-", name.lower()).strip("-") + ".png")
    with writable(path):
        figure.savefig(path, dpi=110)
    return path


def save_curve(swept: Curve, folder: Path) -> Path:
    """Writes a curve to the file that a report uses as well."""
    figure = curve(swept)
    figure.suptitle(swept.title, fontsize=9)
    return save_png(figure, folder, f"curve-{swept.title}")
