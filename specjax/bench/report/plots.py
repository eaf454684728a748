"""The chart of a report: speeds in grey, with hatching for what is slower than plain decoding."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specjax.bench.summary import Measurement
from specjax.core.files import writable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BAR: dict[str, Any] = {"height": 0.7, "facecolor": "0.85", "edgecolor": "black", "linewidth": 0.7}


def speeds(rows: Sequence[Measurement]) -> "Figure":
    """Draws a bar per method: its speed over plain's, with quartiles; hatched if slower."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 0.6 + 0.28 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for place, row in enumerate(rows):
        hatch = "" if row.ratio >= 1 else "////"
        axes.barh(place, row.ratio, hatch=hatch, **BAR)
        axes.plot(row.ratio_quartiles, (place, place), color="black", marker="|", linewidth=1.2)
    axes.axvline(1, color="black", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(rows)), [row.method for row in rows], fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("speed over plain decoding, with quartiles", fontsize=8)
    return figure


def save_png(figure: "Figure", folder: Path, name: str) -> Path:
    """Writes a chart to a file named after it, and returns its path."""
    path = folder / (re.sub(r"[^\w.]+", "-", name.lower()).strip("-") + ".png")
    with writable(path):
        figure.savefig(path, dpi=110)
    return path
