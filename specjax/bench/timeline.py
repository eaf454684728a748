"""Rounds of a few methods as bars over time (ParallelSpec, figures 1 and 5)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from specjax.bench.rounds import PARTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Told apart without colour: by hatching and lightness.
STYLES: dict[str, dict[str, Any]] = {
    "draft": {"facecolor": "white", "hatch": "////", "edgecolor": "black"},
    "verify": {"facecolor": "0.55", "edgecolor": "black"},
    "rest": {"facecolor": "white", "edgecolor": "black"},
    "plain": {"facecolor": "0.85", "hatch": "..", "edgecolor": "0.4"},
}
BAR_HEIGHT = 0.7


@runtime_checkable
class Timed(Protocol):
    """A method's rounds of median parts, as `Trace` has measured them or `Kept` has read them."""

    @property
    def name(self) -> str:
        """Of the method."""
        ...

    @property
    def round_seconds(self) -> float:
        """Of a round of median parts."""
        ...

    def seconds(self, part: str) -> float:
        """Of `draft`, `verify` or `rest`."""
        ...

    def excerpt(self, count: int) -> list[int]:
        """What `count` consecutive rounds committed."""
        ...


@dataclass(frozen=True)
class Kept:
    """Rounds as a file tells them: the figures of one method, its excerpt among them."""

    values: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Of the method."""
        return self.values["method"]

    @property
    def round_seconds(self) -> float:
        """Of a round of median parts."""
        return self.values["round_seconds"]

    def seconds(self, part: str) -> float:
        """Of `draft`, `verify` or `rest`."""
        return self.values[f"{part}_seconds"]

    def excerpt(self, count: int) -> list[int]:
        """The first `count` of the rounds that were kept."""
        return list(self.values["excerpt"][:count])


def draw(traces: Sequence[Timed], plain: Timed, count: int) -> "Figure":
    """`count` rounds of each method, and below them plain decoding's steps for the same tokens.

    Bars are as long as the medians; the number on a round is what that round committed.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(10, 1.2 + 1.2 * len(traces)), layout="constrained")
    axes = figure.add_subplot()
    labels = []
    for trace in traces:
        excerpt = trace.excerpt(count)
        _draw_rounds(axes, len(labels), trace, excerpt)
        labels.append(trace.name)
        _draw_steps(axes, len(labels), plain, sum(excerpt))
        labels.append(f"plain, {sum(excerpt)} tokens")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    names = {"draft": "draft", "verify": "verify", "rest": "commit, update", "plain": "plain step"}
    handles = [Patch(label=text, **STYLES[name]) for name, text in names.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return figure


def _draw_rounds(axes: "Axes", row: int, trace: Timed, excerpt: Sequence[int]) -> None:
    bottom, length = row - BAR_HEIGHT / 2, 1e3 * trace.round_seconds
    offset = 0.0
    for part in PARTS:
        width = 1e3 * trace.seconds(part)
        bars = [(number * length + offset, width) for number in range(len(excerpt))]
        axes.broken_barh(bars, (bottom, BAR_HEIGHT), linewidth=0.8, label=part, **STYLES[part])
        offset += width
    middle = 1e3 * (trace.seconds("draft") + trace.seconds("verify") / 2)
    for number, num_tokens in enumerate(excerpt):
        at = number * length + middle
        box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
        axes.text(at, row, f"+{num_tokens}", ha="center", va="center", fontsize=8, bbox=box)


def _draw_steps(axes: "Axes", row: int, plain: Timed, num_steps: int) -> None:
    length = 1e3 * plain.round_seconds
    bars = [(number * length, length) for number in range(num_steps)]
    place = row - BAR_HEIGHT / 2, BAR_HEIGHT
    axes.broken_barh(bars, place, linewidth=0.8, label="plain", **STYLES["plain"])
