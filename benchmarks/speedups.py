"""Draws the chart of the README: python -m benchmarks.speedups [--folder FOLDER]

With the FOLDER of a finished `specjax bench --out FOLDER`, it first writes the figures over all
tasks, at the first temperature and batch size, to docs/results/speedups.json. The chart lies beside
it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import main
from specjax.bench.measure import PLAIN
from specjax.bench.options import names_in
from specjax.bench.results import read_results
from specjax.bench.summary import last_task_rows
from specjax.core.files import expand_user, writable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES = Path(__file__).parent.parent / "docs" / "results" / "speedups.json"
ABOUT = ("target", "dtype", "device", "machine", "tasks", "num_prompts", "revision", "command")
GREY = "#767676"  # readable on white and on black


@dataclass(frozen=True)
class SpeedupOptions:
    """The options of the chart."""

    folder: str = ""  # a finished benchmark; by default the figures that are there
    figures: str = str(FIGURES)  # the JSON file of the figures


def figures_of(folder: Path) -> dict[str, Any]:
    """Returns the figures of a benchmark, the fastest method first."""
    results = read_results(folder)
    first = results.rows[0].temperature, results.rows[0].batch
    others = names_in(results.about["peers"])
    rows = [row for row in results.rows if (row.temperature, row.batch) == first]
    methods = [
        {
            "method": row.method,
            "accepted_length": round(row.mean_accepted_length, 2),
            "x_plain": round(row.ratio, 2),
            "quartiles": [round(value, 2) for value in row.ratio_quartiles],
        }
        for row in last_task_rows(rows)
        if row.method != PLAIN and row.method.split()[0] not in others
    ]
    about = {name: results.about[name] for name in ABOUT}
    methods.sort(key=lambda row: -row["x_plain"])
    return {**about, "temperature": first[0], "batch": first[1], "methods": methods}


def chart(figures: Mapping[str, Any]) -> "Figure":
    """Draws the speed of each method over plain decoding, with quartiles and accepted lengths."""
    from matplotlib.figure import Figure

    rows = figures["methods"]
    figure = Figure(figsize=(8, 1.1 + 0.3 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    ratios = [row["x_plain"] for row in rows]
    low, high = zip(*(row["quartiles"] for row in rows), strict=True)
    spread = [
        [max(0.0, ratio - value) for ratio, value in zip(ratios, low, strict=True)],
        [max(0.0, value - ratio) for ratio, value in zip(ratios, high, strict=True)],
    ]
    names = [row["method"] for row in rows]
    axes.barh(names, ratios, xerr=spread, color="#9db4c0", edgecolor=GREY, ecolor=GREY, capsize=2)
    for at, row in enumerate(rows):
        text = f"{row['x_plain']:.2f}x, {row['accepted_length']:.2f} tokens per pass"
        axes.text(1.05 * max(1, *high), at, text, va="center", color=GREY)
    axes.axvline(1, color=GREY, linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.55 * max(1, *high))
    axes.set_xlabel("speed over plain decoding (dashed: 1); whiskers: quartiles", color=GREY)
    facts = [figures[name] for name in ("target", "dtype", "machine")]
    title = f"{', '.join(facts)}, T={figures['temperature']:g}"
    axes.set_title(title, color=GREY, fontsize=10)
    axes.tick_params(colors=GREY)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GREY)
    return figure


def run(options: SpeedupOptions) -> None:
    """Writes the figures, if a folder is given, and the chart."""
    from matplotlib import rc_context

    path = expand_user(Path(options.figures))
    if options.folder:
        figures = figures_of(Path(options.folder))
        with writable(path):
            path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    figures = json.loads(path.read_text(encoding="utf-8"))
    with rc_context({"svg.hashsalt": "speedups", "svg.fonttype": "none"}):
        chart(figures).savefig(path.with_suffix(".svg"), transparent=True, metadata={"Date": None})
    print(f"written to {path.with_suffix('.svg')}")


if __name__ == "__main__":
    main(run, SpeedupOptions, __doc__)
