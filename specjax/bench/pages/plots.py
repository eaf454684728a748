"""The pictures of a report: in shades of grey, told apart by hatching, markers and lines.

Every function returns a matplotlib figure, which becomes a PNG file, or SVG inside a page whose
colours follow the reader's scheme.
"""

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specjax.bench.curves import Curve
from specjax.bench.oracle import MOST_SHOWN, OracleLengths
from specjax.bench.summary import Measurement
from specjax.bench.timeline import Kept, draw
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
# What a page's style sheet names the greys that matplotlib writes.
SCHEME = {
    "#000000": "var(--ink)",
    "#ffffff": "var(--page)",
    "#666666": "var(--soft)",
    "#8c8c8c": "var(--mid)",
    "#d9d9d9": "var(--light)",
}


def histograms(
    rows: Sequence[Measurement], beside: Sequence[Measurement] | None = None
) -> "Figure":
    """A panel per method: the share of rounds that committed so many tokens.

    All shares have one scale, which also fits those of `beside`.
    """
    top = max(shares.max(initial=0) for shares in map(_shares, beside or rows))
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
    """A panel per method: the acceptance rate at every depth."""
    figure, panels = _panels(len(rows))
    for axes, row in zip(panels, rows, strict=True):
        depths, size = range(1, len(row.rates) + 1), 4 if len(row.rates) <= 20 else 2
        axes.plot(depths, row.rates, markersize=size, linewidth=1, **LINES[0])
        _finish(axes, row.method, "depth", "accepted", len(row.rates))
        axes.set_ylim(-0.04, 1.04)
    return figure


def rounds_over_time(methods: Sequence[Mapping[str, Any]]) -> "Figure":
    """The rounds of `traces.json`, whose first method is plain decoding."""
    plain, *others = map(Kept, methods)
    return draw(others, plain, max(len(each["excerpt"]) for each in methods))


def oracle_lengths(lengths: Sequence[OracleLengths]) -> "Figure":
    """A panel per kind of task: how often the oracle drafts so many tokens (DISCO, figure 3)."""
    figure, panels = _panels(len(lengths))
    for axes, each in zip(panels, lengths, strict=True):
        shares = np.asarray(each.histogram) / sum(each.histogram)
        axes.bar(range(len(shares)), shares, width=0.9, **BAR)
        axes.axvline(each.mean, color="black", linestyle="--", linewidth=1)
        more = f" ({MOST_SHOWN}: and more)" if len(shares) > MOST_SHOWN else ""
        title = f"{each.task}, mean {each.mean:.2f}"
        _finish(axes, title, f"drafted tokens{more}", "share of rounds", len(shares) - 1, 0)
    return figure


def oracle_course(lengths: Sequence[OracleLengths]) -> "Figure":
    """A panel per kind of task: the oracle's lengths in the course of a run (DISCO, figure 5)."""
    figure, panels = _panels(len(lengths))
    for axes, each in zip(panels, lengths, strict=True):
        means = [np.nan if mean is None else mean for mean in each.course]
        axes.plot(range(1, len(means) + 1), means, markersize=4, linewidth=1, **LINES[0])
        _finish(axes, each.task, "tenth of the run", "drafted tokens", len(means))
        axes.set_ylim(0, 1.1 * max(np.nanmax(means), 1))
    return figure


def curve(found: Curve) -> "Figure":
    """Accepted length and tokens per second over a setting, one line per series."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 3), layout="constrained")
    lengths, speeds = figure.subplots(1, 2)
    for number, (name, points) in enumerate(found.series.items()):
        values = [str(point.value) for point in points]
        style: dict[str, Any] = {"label": name, "markersize": 5, "linewidth": 1}
        style |= LINES[number % len(LINES)]
        lengths.plot(values, [point.accepted_length for point in points], **style)
        speeds.plot(values, [point.tokens_per_second for point in points], **style)
    for axes, label in ((lengths, "accepted length"), (speeds, "tokens/s")):
        axes.set(xlabel=found.setting, ylabel=label)
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


def _finish(axes: "Axes", title: str, xlabel: str, ylabel: str, last: int, first: int = 1) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, fontsize=9)
    axes.set_xlabel(xlabel, fontsize=8)
    axes.set_ylabel(ylabel, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.set_xlim(first - 0.7, max(last, first + 1) + 0.7)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color="0.85", linewidth=0.6)


def save_png(figure: "Figure", folder: Path, name: str) -> Path:
    """Writes the picture to a file that is called after it, and returns its path.

    Raises:
        SpecjaxError: if it cannot be written.
    """
    path = folder / (re.sub(r"[^\w.]+", "-", name.lower()).strip("-") + ".png")
    with writable(path):
        figure.savefig(path, dpi=110)
    return path


def save_curve(found: Curve, folder: Path) -> Path:
    """As `save_png`; a sweep and a report write the same file.

    Raises:
        SpecjaxError: if it cannot be written.
    """
    figure = curve(found)
    figure.suptitle(found.title, fontsize=9)
    return save_png(figure, folder, f"curve-{found.title}")


def inline_svg(figure: "Figure", label: str, name: str) -> str:
    """The picture as an element of an HTML page.

    Args:
        figure: in the greys of `SCHEME`.
        label: what those are told who cannot see it.
        name: of letters and digits, and of no other picture in the page.
    """
    from matplotlib import rc_context

    file = io.StringIO()
    unsigned = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, metadata=unsigned)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    head, body = svg.split(">", 1)
    viewbox = re.search(r'viewBox="[^"]*"', head)
    assert viewbox is not None
    body = re.sub(r"<!--.*?-->\s*", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r"(\d\.\d\d)\d+", r"\1", body)
    for grey, variable in SCHEME.items():
        body = body.replace(grey, variable)
    used = set(re.findall(r"#([\w-]+)", body))
    body = re.sub(r' id="([\w-]+)"', lambda m: m[0] if m[1] in used else "", body)
    return f'<svg role="img" aria-label="{escape(label)}" {viewbox[0]}>{body}'
