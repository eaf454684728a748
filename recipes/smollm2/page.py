"""Writes the results of SmolLM2: page, chart, and the figures of the README and the start page."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.smollm2.many_heads import ALL_RUNS, start_of
from specjax import SpecjaxError
from specjax.bench.measure import PLAIN
from specjax.bench.summary import ALL
from specjax.core.files import read_text, write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "results" / "smollm2.json"
TEMPLATE = Path(__file__).with_name("page.md")
CHART = "smollm2.svg"
QUOTED = {"README.md": "docs/results/", "docs/index.md": "results/"}  # and the folder of the chart
PEERS = {"transformers": "float32", "llama.cpp": "bfloat16"}  # and their weights
TASKS = {
    **{"MT-bench": "chat", "qa": "QA", "math_reasoning": "maths", "MBPP": "MBPP"},
    **{"translation": "translation", "summarization": "summaries", "rag": "RAG"},
    **{"code edit": "code edits", "text edit": "text edits", ALL: "all"},
}
SHOWN = ("MT-bench", "math_reasoning", "summarization", "code edit", "text edit", ALL)
CONDITIONS = {  # part, temperature, batch
    "T=0": ("greedy", 0.0, 1),
    "T=1": ("sampled", 1.0, 1),
    "T=0, four at a time": ("batches", 0.0, 4),
    "T=1, four at a time": ("batches", 1.0, 4),
}
NODES = (4, 8, 16, 64)  # of trees that are compared
UNTRAINED = ("pld", "pld-plus", "recycling", "lookahead", "pld+recycling")
WIDTHS = (1, 4, 8, 16, 64)  # of passes, in tokens
STEPS = (250, 500, 1000, 2000)  # of a training whose accepted lengths are shown
NUM_BARS = 4
GREY = "#767676"  # readable on white and on black
COLOURS = {"transformers": "#c2583c", "llama.cpp": "#3c7dc2"}
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Figures:
    """All figures, as docs/results/smollm2.json holds them."""

    about: Mapping[str, Any]
    rows: Sequence[Row]

    def row(
        self, method: str, task: str = ALL, part: str = "greedy", t: float = 0.0, batch: int = 1
    ) -> Row:
        """Returns the figures of a method."""
        key = method, task, part, t, batch
        for row in self.rows:
            if key == tuple(row[x] for x in ("method", "task", "part", "temperature", "batch")):
                return row
        raise SpecjaxError(f"no figures of {method} on {task}, part {part}; measure again")

    def ranked(self, task: str = ALL, peers: bool = False, part: str = "greedy") -> list[str]:
        """Returns our methods (or the peers' ways), the fastest first."""
        rows = [row for row in self.rows if (row["part"], row["task"]) == (part, task)]
        rows = [row for row in rows if row["method"] != PLAIN and _is_peer(row) == peers]
        rows.sort(key=lambda row: -row["speed"])
        return list(dict.fromkeys(row["method"] for row in rows))


def write_pages(figures: Figures, root: Path) -> list[Path]:
    """Writes the page and its chart, and the figures between the marks of other pages."""
    from matplotlib import rc_context

    folder = root / "docs" / "results"
    written = {folder / "smollm2.md": page(figures)}
    for name, charts in QUOTED.items():
        written[root / name] = quoted(root / name, summary(figures, charts))
    for path, text in written.items():
        write_whole(path, text.encode())
    drawing = folder / CHART
    with rc_context({"svg.hashsalt": "specjax", "svg.fonttype": "none"}):
        chart(figures).savefig(drawing, transparent=True, metadata={"Date": None})
    return [*written, drawing]


def quoted(path: Path, text: str) -> str:
    """Returns a page with this text between its marks."""
    before = read_text(path)
    marked = re.compile(r"(?<=<!-- figures -->\n).*(?=<!-- /figures -->)", re.DOTALL)
    if not marked.search(before):
        raise SpecjaxError(f"{path} has no `<!-- figures -->` and `<!-- /figures -->`; add them")
    return marked.sub(lambda match: text, before)


# ---- Text ---------------------------------------------------------------------------------------


def summary(figures: Figures, charts: str) -> str:
    """Returns the chart, and the figures that a reader sees first."""
    return (
        f"![Speed of the best methods over plain decoding]({charts}{CHART})\n\n"
        f"{_where(figures)}, tokens per second over {figures.about['num_prompts']} questions at "
        f"temperature 0, prefill included:\n\n"
        f"{peer_table(figures)}\n\n"
        f"{_gain(figures)} {_sameness(figures)}\n"
    )


def page(figures: Figures) -> str:
    """Returns the page."""
    about, ranked = figures.about, figures.ranked()
    return TEMPLATE.read_text(encoding="utf-8").format(
        where=_where(figures),
        num_prompts=about["num_prompts"],
        per_kind=about["num_prompts"] // (len(TASKS) - 1),
        max_new_tokens=about["max_new_tokens"],
        revision=about["revision"][:12],
        command=about["command"],
        products=about["products"],
        nodes=about["nodes"],
        bandwidth=f"{about['bandwidth'] / 1e9:.0f}",
        peers=peer_table(figures),
        gain=_gain(figures),
        sameness=_sameness(figures),
        num_faster=sum(figures.row(method)["speed"] > 1 for method in ranked),
        num_methods=len(ranked),
        speeds=speed_table(figures),
        accepted=accepted_table(figures),
        sizes=node_table(figures),
        conditions=condition_table(figures),
        weights=weight_table(figures),
        passes=pass_table(figures),
        limit=_limit(figures),
        choice=choice_table(figures),
        curves=curve_table(figures),
        gains=_gains(figures),
    )


def _where(figures: Figures) -> str:
    about = figures.about
    name = str(about["target"]).split(".Q")[0]
    return f"{name} in {about['dtype']} on a CPU ({about['machine']})"


def _gain(figures: Figures) -> str:
    best = figures.ranked()[0]
    low, high = figures.row(best)["quartiles"]
    top = max(TASKS, key=lambda task: figures.row(figures.ranked(task)[0], task)["speed"])
    first = figures.ranked(top)[0]
    free = next(method for method in figures.ranked() if method in UNTRAINED)
    without = f"without one the best is `{free}`, {figures.row(free)['speed']:.2f}x. "
    return (
        f"`{best}` has the highest median speed over all questions, "
        f"{figures.row(best)['speed']:.2f}x plain decoding (quartiles {low:.2f} to {high:.2f}). "
        + f"It drafts with a trained head; {without}" * (best != free)
        + f"`{first}` reaches {figures.row(first, top)['speed']:.2f}x on {TASKS[top]}."
    )


def _limit(figures: Figures) -> str:
    best = figures.ranked()[0]
    row = figures.row(best)
    gain = row["accepted"] / row["round"]
    whole = row["tokens_per_second"] / figures.row(PLAIN)["tokens_per_second"]
    return (
        f"A round of `{best}` adds {row['accepted']:.2f} tokens and takes as long as "
        f"{row['round']:.2f} plain steps, so decoding alone is {gain:.2f} times as fast, and "
        f"{whole:.2f} times with prefill, which drafting does not shorten. To be twice as fast, a "
        f"round would have to add more than {2 * row['round']:.2f} tokens."
    )


def _sameness(figures: Figures) -> str:
    rows = [row for row in figures.rows if row["task"] == ALL]
    counts = [row["different"] for row in rows if row["different"] is not None]
    if not sum(counts):
        return "All texts equal those of plain decoding, token for token."
    return f"{sum(counts)} texts differ from those of plain decoding."


# ---- Tables -------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Writes a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def speed_table(figures: Figures) -> str:
    """Lists the speed over plain decoding by kind of text; our fastest is bold."""

    def cell(method: str, task: str) -> str:
        text = f"{figures.row(method, task)['speed']:.2f}x"
        return f"**{text}**" if method == figures.ranked(task)[0] else text

    methods = [*figures.ranked(), *filter(_way, figures.ranked(peers=True))]
    rows = [[_name(method), *(cell(method, task) for task in SHOWN)] for method in methods]
    return table(["", *(TASKS[task] for task in SHOWN)], rows)


def accepted_table(figures: Figures) -> str:
    """Lists the accepted length, and the cost of a round."""
    tasks = [task for task in SHOWN if task != "summarization"]
    methods = sorted(figures.ranked(), key=lambda method: -figures.row(method)["accepted"])
    rows = [
        [
            _name(method),
            *(f"{figures.row(method, task)['accepted']:.2f}" for task in tasks),
            f"{figures.row(method)['round']:.2f}",
        ]
        for method in methods
    ]
    return table(["", *(TASKS[task] for task in tasks), "a round, in plain steps"], rows)


def condition_table(figures: Figures) -> str:
    """Lists speed and accepted length at two temperatures and batch sizes."""

    def cell(method: str, part: str, temperature: float, batch: int) -> str:
        row = figures.row(method, ALL, part, temperature, batch)
        return f"{row['speed']:.2f}x, {row['accepted']:.2f}"

    methods = figures.ranked(part="batches")
    rows = [
        [_name(m), *(cell(m, *condition) for condition in CONDITIONS.values())] for m in methods
    ]
    return table(["", *CONDITIONS], rows)


def node_table(figures: Figures) -> str:
    """Lists accepted lengths by the size of trees."""

    def cell(method: str, nodes: int) -> str:
        return f"{figures.row(method, part=f'nodes-{nodes}')['accepted']:.2f}"

    methods = figures.ranked(part=f"nodes-{NODES[0]}")
    rows = [[_name(method), *(cell(method, nodes) for nodes in NODES)] for method in methods]
    return table(["", *(f"{nodes} nodes" for nodes in NODES)], rows)


def pass_table(figures: Figures) -> str:
    """Lists how long a pass takes by its width and the weights, over that of one token."""
    rows = []
    for weights, seconds in figures.about["passes"].items():
        one, *wider = (seconds[str(width)] for width in WIDTHS)
        rows.append([weights, f"{1e3 * one:.1f} ms", *(f"{value / one:.2f}" for value in wider)])
    return table(["weights", "one token", *(f"{width} tokens" for width in WIDTHS[1:])], rows)


def weight_table(figures: Figures) -> str:
    """Lists tokens per second with quantised weights, beside llama.cpp."""
    rows = []
    for weights, part, peer in (
        ("bfloat16", "greedy", "llama.cpp"),
        ("int8; Q8_0", "int8", "llama.cpp Q8_0"),
        ("int4; Q4_1", "int4", "llama.cpp stored"),
    ):
        found = [figures.row(m, part=part) for m in (PLAIN, "pld-plus")] + [figures.row(peer)]
        rows.append([weights, *(f"{row['tokens_per_second']:.1f}" for row in found)])
    return table(["weights", "plain", "`pld-plus`", "llama.cpp"], rows)


def choice_table(figures: Figures) -> str:
    """Lists the fastest methods for each kind of text."""
    rows = []
    for task, name in TASKS.items():
        first, second = figures.ranked(task)[:2]
        best, plain = figures.row(first, task), figures.row(PLAIN, task)
        speeds = (f"{row['tokens_per_second']:.0f}" for row in (plain, best))
        second = f"{_name(second)}, {figures.row(second, task)['speed']:.2f}x"
        rows.append([name, _name(first), f"{best['speed']:.2f}x", second, *speeds])
    header = ["text", "fastest", "speed", "next", "plain, tokens/s", "fastest, tokens/s"]
    return table(header, rows)


def peer_table(figures: Figures) -> str:
    """Lists tokens per second of plain decoding and of the best drafts, ours and the peers'."""
    rows = []
    for peer, weights in PEERS.items():
        drafting = figures.row(f"{peer} pld")["tokens_per_second"]
        plain = figures.row(peer)["tokens_per_second"]
        rows.append([f"{peer} ({weights})", f"{plain:.0f}", f"{drafting:.0f} (prompt lookup)"])
    best = max(figures.ranked(), key=lambda method: figures.row(method)["tokens_per_second"])
    plain, fastest = (figures.row(method)["tokens_per_second"] for method in (PLAIN, best))
    ours = f"**specjax** ({figures.about['dtype']})"
    rows.append([ours, f"**{plain:.0f}**", f"**{fastest:.0f}** (`{best}`)"])
    return table(["", "plain decoding", "with drafts"], rows)


def curve_table(figures: Figures) -> str:
    """Lists the accepted length of each head after some steps of its training."""
    rows = []
    for name, curve in figures.about["curves"].items():
        *_, (step, last) = curve.items()
        measured = [f"{curve[x]:.2f}" if (x := str(count)) in curve else "" for count in STEPS]
        start = start_of(ALL_RUNS[name]) if len(curve) > 1 else None  # unknown without records
        rows.append([_name(name), _name(start) if start else "", *measured, f"{last:.2f} ({step})"])
    return table(["run", "starts from", *map(str, STEPS), "last step"], rows)


def _gains(figures: Figures) -> str:
    """Says how much more HASS accepts than EAGLE after the same further training, if known."""
    last = {name: [*curve.values()][-1] for name, curve in figures.about["curves"].items()}
    pairs = [("hass", "eagle-longer"), ("hass-short", "eagle-short")]
    ratios = [f"{last[x] / last[y]:.2f}" for x, y in pairs if {x, y} <= {*last}]
    if not ratios:
        return ""
    times = " and ".join(ratios)
    return (
        f"After the same training HASS accepts {times} times as much as EAGLE; the paper has "
        "1.12 over EAGLE's released heads."
    )


def _name(method: str) -> str:
    return method if method.startswith(tuple(PEERS)) else f"`{method}`"


def _is_peer(row: Row) -> bool:
    return row["method"].startswith(tuple(PEERS))


# ---- Chart --------------------------------------------------------------------------------------


def chart(figures: Figures) -> "Figure":
    """Draws the best methods' speed over plain decoding by kind of text, and each peer's best."""
    from matplotlib.figure import Figure

    methods = figures.ranked()[:NUM_BARS]
    figure = Figure(figsize=(8.6, 4.2), layout="constrained")
    grid = figure.subplots(2, 5, sharex=True, sharey=True)
    for axes, (task, title) in zip(grid.flat, TASKS.items(), strict=True):
        speeds = [figures.row(method, task)["speed"] for method in methods]
        colours = ["#2f8f63" if speed > 1 else "#8a8a8a" for speed in speeds]
        axes.barh(methods, speeds, color=colours)
        for at, speed in enumerate(speeds):
            axes.text(0.06, at, f"{speed:.2f}x", va="center", color="white", fontsize=9)
        axes.axvline(1, color=GREY, linestyle="--", linewidth=1, label="plain decoding")
        for peer in PEERS:
            ways = [way for way in figures.ranked(task, peers=True) if _way(way) == peer]
            best = figures.row(ways[0], task)["speed"]
            axes.axvline(best, color=COLOURS[peer], linewidth=1.5, label=f"{peer}, its best")
        axes.set_title(title, color=GREY, fontsize=10, fontweight="bold" if task == ALL else None)
        axes.tick_params(colors=GREY, labelsize=8)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(GREY)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.05 * max(row["speed"] for row in figures.rows if row["method"] in methods))
    handles, names = axes.get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside lower center", ncols=3, frameon=False, labelcolor=GREY
    )
    figure.suptitle("speed over plain decoding (bars: specjax)", color=GREY, fontsize=10)
    return figure


def _way(method: str) -> str:
    """Returns the peer, for its ways to run the same weights; "" for quantised ones."""
    return method.removesuffix(" pld") if method.removesuffix(" pld") in PEERS else ""
