"""Helps the notebooks: loads a target that fits the machine; shows texts, rounds and reports."""

import io
import re
import shlex
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from specjax.cli import main
from specjax.core.errors import SpecjaxError
from specjax.core.memory import device_bytes
from specjax.core.text import token_texts
from specjax.decoding.drafter import Drafter, Params, Proposal
from specjax.decoding.engine import Engine
from specjax.decoding.prompt import Prompt, padded_length
from specjax.decoding.state import Generation, LoopState
from specjax.decoding.tree import DraftTree, Verification
from specjax.loading.hub import POCKET
from specjax.loading.targets import LoadedTarget
from specjax.loading.targets import load as load_target
from specjax.models.target import ModelOutput
from specjax.run.attribution import Span, sources_in_prompt, spans_of
from specjax.run.engines import make_engine
from specjax.run.runner import Runner

if TYPE_CHECKING:
    from IPython.display import HTML, Markdown

TARGETS = {  # the number of weights; the largest that fits is taken
    "Qwen/Qwen2.5-7B-Instruct": 7.6e9,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1.7e9,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 0.36e9,
}
SHARE = 0.5  # of the memory, for the weights
KINDS = {  # kind of node: marker, area, fill, edge, sign inside, its colour
    "root": ("s", 420, "black", "black", "R", "white"),
    "accepted": ("o", 460, "tab:blue", "black", "✓", "white"),
    "rejected": ("o", 460, "white", "dimgray", "✗", "dimgray"),
    "bonus": ("D", 330, "gold", "black", "+", "black"),
}
VISIBLE = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥"})
DRAFTED = "background: rgba(46, 160, 67, 0.25); text-decoration: underline"
HATCHES = ("", "//", "..", "xx", "\\\\", "++")
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Attribution</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem; color: #222; background: #fff }}
main {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(16rem, 1fr)); gap: 1.5rem }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #ccc; padding: 1rem }}
.copied {{ background: #e4f0e4 }} .copied.on {{ background: #7fc97f }}
</style>
<h1>Where the output comes from</h1><p>{summary} Hover over a green part to see its source.</p>
<main><section><h2>Context</h2><pre>{context}</pre></section>
<section><h2>Output</h2><pre>{output}</pre></section></main>
<script>
const light = (target, on) => (target.dataset.spans ?? "").split(" ").filter(Boolean).forEach(
  name => document.querySelectorAll("." + name).forEach(e => e.classList.toggle("on", on)));
document.addEventListener("mouseover", event => light(event.target, true));
document.addEventListener("mouseout", event => light(event.target, false));
</script></html>
"""
PARTS = ("draft", "verify", "rest")
PART_STYLES: dict[str, dict[str, Any]] = {
    "draft": {"facecolor": "white", "hatch": "////", "edgecolor": "black"},
    "verify": {"facecolor": "0.55", "edgecolor": "black"},
    "rest": {"facecolor": "white", "edgecolor": "black"},
    "plain": {"facecolor": "0.85", "hatch": "..", "edgecolor": "0.4"},
}
PART_NAMES = {"rest": "commit, update", "plain": "plain step"}
BAR_HEIGHT = 0.7
Node = tuple[int, int, int, str]  # parent, depth, token and kind


class Round(NamedTuple):
    """One round of a single sequence: its tree, what was accepted, and the seconds of its parts."""

    draft: float
    verify: float  # the target pass and the verification
    rest: float  # the commit and the drafter's update
    num_tokens: int  # committed, bonus included
    tree: DraftTree | None = None
    verification: Verification | None = None

    @property
    def seconds(self) -> float:
        """Seconds of all parts."""
        return self.draft + self.verify + self.rest


def fitting(memory: int | None) -> tuple[str, str | None]:
    """Returns the target for a device with this many bytes, and "int8" if only that fits.

    The weights may take half of the memory. A CPU, whose memory is None, gets pocket.
    """
    for name, size in TARGETS.items():
        for bytes_per_weight, quantize in ((2, None), (1, "int8")):
            if memory is not None and size * bytes_per_weight <= SHARE * memory:
                return name, quantize
    return POCKET, None


def load(name: str | None = None, **options: Any) -> LoadedTarget:
    """Loads a target as `specjax.load` does, by default the one that fits, and prints it."""
    device = jax.devices()[0]
    memory = (device.memory_stats() or {}).get("bytes_limit") if device.platform != "cpu" else None
    if name is None:
        name, quantize = fitting(memory)
        options = {"quantize": quantize, **options}
    target = load_target(name, **options)
    size = f", {memory / 1e9:.0f} GB" if memory else ""
    print(f"{device.platform.upper()} ({device.device_kind}{size})")
    print(f"{name} in {target.dtype_name}, {device_bytes(target.params) / 1e6:,.0f} MB of weights")
    return target


def command(line: str) -> None:
    """Runs a command line of specjax in this process: `command("bench --limit 2")`."""
    if main(shlex.split(line)):
        raise SpecjaxError(f"`specjax {line}` failed; see its message above")


def new_tokens(generation: Generation, sequence: int = 0) -> list[int]:
    """Returns the new tokens of a sequence."""
    return generation.tokens[sequence, : generation.length[sequence]].tolist()


def drafted_text(target: LoadedTarget, generation: Generation) -> "HTML":
    """Returns the first sequence's text, with drafted and accepted tokens underlined."""
    from IPython.display import HTML

    def marked(text: str, is_drafted: bool) -> str:
        return f'<span style="{DRAFTED}">{escape(text)}</span>' if is_drafted else escape(text)

    texts = token_texts(target.tokenizer, new_tokens(generation))
    pairs = zip(texts, generation.from_draft[0].tolist(), strict=False)
    runs = groupby(pairs, key=lambda pair: pair[1])
    body = "".join(marked("".join(text for text, _ in run), drafted) for drafted, run in runs)
    legend = f"{marked('drafted and accepted', True)} &nbsp; added by the target"
    return HTML(f'<p>{legend}</p><pre style="white-space: pre-wrap">{body}</pre>')


def sources_of(target: LoadedTarget, prompt: Prompt, generation: Generation) -> "HTML":
    """Returns prompt and output side by side; hovering over a copy shows its source."""
    from IPython.display import HTML

    ids, tokens = prompt.tokens[0, : prompt.length[0]].tolist(), new_tokens(generation)
    source = sources_in_prompt(generation.source[0, : len(tokens)].tolist(), len(ids))
    prompt_texts, output_texts = (token_texts(target.tokenizer, part) for part in (ids, tokens))
    page = escape(attribution_page(prompt_texts, output_texts, spans_of(source)))
    style = "width: 100%; height: 480px; border: 1px solid #ccc"
    return HTML(f'<div><iframe srcdoc="{page}" style="{style}"></iframe></div>')


def attribution_page(prompt: Sequence[str], output: Sequence[str], spans: Sequence[Span]) -> str:
    """Returns a page with the tokens of prompt and output side by side, and the spans marked."""
    sources = [range(span.source, span.source + span.end - span.start) for span in spans]
    context = "".join(
        _mark(text, [n for n, source in enumerate(sources) if at in source], at)
        for at, text in enumerate(prompt)
    )
    owner = {at: n for n, span in enumerate(spans) for at in range(span.start, span.end)}
    copied = "".join(
        _mark(text, [owner[at]] if at in owner else []) for at, text in enumerate(output)
    )
    summary = f"{len(owner)} of {len(output)} output tokens were copied from the context."
    return PAGE.format(summary=summary, context=context, output=copied)


def _mark(text: str, spans: list[int], position: int | None = None) -> str:
    classes = " ".join(f"s{number}" for number in spans)
    title = "" if position is None else f' title="position {position}"'
    kind = f' class="copied {classes}" data-spans="{classes}"' if spans else ""
    return f"<span{kind}{title}>{escape(text)}</span>"


def show_report(folder: Path) -> "Markdown":
    """Returns the report that `specjax report` wrote into a folder, with its charts."""
    from IPython.display import Markdown

    def embedded(link: re.Match) -> str:
        return f"](data:image/png;base64,{b64encode((folder / link[1]).read_bytes()).decode()})"

    return Markdown(re.sub(r"\]\(([\w.-]+\.png)\)", embedded, (folder / "report.md").read_text()))


def trace_rounds(
    target: LoadedTarget,
    drafter: Drafter,
    drafter_params: Any,
    prompt: Prompt,
    max_new_tokens: int = 256,
) -> list[Round]:
    """Continues a prompt greedily and times the parts of every round, after compiling them."""
    ids = prompt.tokens[0, : prompt.length[0]].tolist()
    engine = make_engine(target, (drafter, drafter_params), max_new_tokens)
    runner = Runner("", *engine, padded_length([ids]))
    for _ in range(2):  # the first run compiles
        rounds = list(timed_rounds(runner, ids))
    return rounds


def timed_rounds(runner: Runner, ids: Sequence[int]) -> Iterator[Round]:
    """Continues a single prompt and times the parts of every round.

    Separate parts take a little longer than a round in one program: each is started from the
    host and must write its results.
    """
    engine, params = runner.engine, runner.params
    state = runner.prefill(runner.prepare([ids]))
    while not bool(state.is_done[0]):
        length, times = int(state.length[0]), [time.perf_counter()]
        state, proposal = jax.block_until_ready(_propose(engine, params, state))
        times.append(time.perf_counter())
        state, output, verification = jax.block_until_ready(
            _verify(engine, params, state, proposal)
        )
        times.append(time.perf_counter())
        state = jax.block_until_ready(
            _commit(engine, params, state, proposal.tree, output, verification)
        )
        times.append(time.perf_counter())
        drafting, verifying, rest = (after - before for before, after in pairwise(times))
        num_tokens = int(state.length[0]) - length
        tree, verification = jax.device_get((proposal.tree, verification))
        yield Round(drafting, verifying, rest, num_tokens, tree, verification)


# The state is donated, as decoding's own loop changes its caches in place.
_part = partial(jax.jit, static_argnums=0, donate_argnames="state")
_propose, _commit = map(_part, (Engine.propose, Engine.commit))


@_part
def _verify(
    engine: Engine, params: Params, state: LoopState, proposal: Proposal
) -> tuple[LoopState, ModelOutput, Verification]:
    output, verification, cache = engine.verify(params, state, proposal)
    return replace(state, cache=cache), output, verification


def mixed_round(rounds: Sequence[Round]) -> Round:
    """Returns a round with both accepted and rejected nodes, if there is one."""

    def mixture(one: Round) -> tuple[int, int]:
        kinds = [kind for *_, kind in _nodes(one)]
        return min(kinds.count("accepted"), kinds.count("rejected")), len(kinds)

    return max(rounds, key=mixture)


def draw_round(target: LoadedTarget, one: Round) -> None:
    """Draws the draft tree of a round, and the bonus token."""
    nodes = _nodes(one)
    lines = _lines(nodes)
    depth, height = max(node[1] for node in nodes), max(lines.values())
    figure = Figure(figsize=(max(7, 0.9 * depth + 1.5), 0.62 * height + 1.7), layout="tight")
    axes = figure.add_subplot()
    for node, (parent, column, token, kind) in enumerate(nodes):
        marker, area, fill, edge, sign, sign_colour = KINDS[kind]
        if node > 0:
            ends = [nodes[parent][1], column], [-lines[parent], -lines[node]]
            axes.plot(*ends, "--" if kind == "rejected" else "-", color=edge, zorder=1)
        at = column, -lines[node]
        axes.scatter(*at, s=area, marker=marker, color=fill, edgecolor=edge, zorder=2)
        axes.text(*at, sign, color=sign_colour, ha="center", va="center", fontsize=12)
        text = target.tokenizer.decode([token]).translate(VISIBLE)
        below: dict[str, Any] = {"xytext": (0, -17), "textcoords": "offset points", "va": "top"}
        below |= {"ha": "center", "family": "monospace", "parse_math": False}
        below["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.annotate(text if len(text) <= 9 else text[:8] + "…", at, **below)
    for kind, (marker, _, fill, edge, sign, _) in KINDS.items():
        label = f"{sign} {kind}"
        axes.scatter([], [], s=90, marker=marker, color=fill, edgecolor=edge, label=label)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(KINDS), frameon=False)
    axes.set(xlim=(-0.6, depth + 0.6), ylim=(-height - 0.7, 0.4))
    axes.axis("off")
    _show(figure)


def _nodes(one: Round) -> list[Node]:
    """Returns the nodes of a round; the bonus comes last."""
    tree, verification = one.tree, one.verification
    assert tree is not None and verification is not None
    path = verification.path[0][: int(verification.num_accepted[0]) + 1].tolist()
    count = int(tree.num_valid()[0])
    kinds = ["root", *("accepted" if node in path else "rejected" for node in range(1, count))]
    columns = (column[0][:count].tolist() for column in (tree.parents, tree.depth, tree.tokens))
    bonus = path[-1], len(path), int(verification.bonus[0]), "bonus"
    return [*zip(*columns, kinds, strict=True), bonus]


def _lines(nodes: Sequence[Node]) -> dict[int, int]:
    """Returns the line of each node: the path is on the first, and no two branches cross."""
    lines, last = {0: 0}, 0
    waiting = [0]
    while waiting:
        node = waiting.pop()
        if node not in lines:
            last += 1
            lines[node] = last
        children = [child for child in range(1, len(nodes)) if nodes[child][0] == node]
        children.sort(key=lambda child: nodes[child][3] == "rejected")
        lines |= dict.fromkeys(children[:1], lines[node])  # the first continues its parent's line
        waiting += reversed(children)
    return lines


def draw_bars(values: Mapping[str, float], label: str, form: str = "{:.2f}") -> None:
    """Draws a bar for each value, with the value at its end."""
    figure = Figure(figsize=(7, 0.8 + 0.5 * len(values)), layout="tight")
    axes = figure.add_subplot()
    style: dict[str, Any] = {"color": "lightgray", "edgecolor": "black"}
    style["hatch"] = [HATCHES[number % len(HATCHES)] for number in range(len(values))]
    bars = axes.barh(list(values), list(values.values()), **style)
    axes.bar_label(bars, [form.format(value) for value in values.values()], padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    _show(figure)


def draw_timeline(methods: Mapping[str, Sequence[Round]], num_rounds: int = 5) -> None:
    """Draws rounds of each method over time, above steps of plain decoding, the first method."""
    _show(rounds_over_time(methods, num_rounds))


def rounds_over_time(methods: Mapping[str, Sequence[Round]], num_rounds: int) -> Figure:
    """Draws rounds of each method, and below them plain decoding's steps for the same tokens.

    Plain decoding comes first. Bars are as long as the medians; the number on a round is how many
    tokens it committed (ParallelSpec, figures 1 and 5).
    """
    plain, *others = methods
    step = sum(_milliseconds(methods[plain]).values())
    figure = Figure(figsize=(10, 1.2 + 1.2 * len(others)), layout="constrained")
    axes = figure.add_subplot()
    labels = []
    for name in others:
        excerpt = _typical([one.num_tokens for one in methods[name]], num_rounds)
        _draw_rounds(axes, len(labels), _milliseconds(methods[name]), excerpt)
        _draw_steps(axes, len(labels) + 1, step, sum(excerpt))
        labels += [name, f"plain, {sum(excerpt)} tokens"]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    handles = [
        Patch(label=PART_NAMES.get(name, name), **style) for name, style in PART_STYLES.items()
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return figure


def _typical(tokens: Sequence[int], count: int) -> Sequence[int]:
    """Returns the tokens of `count` consecutive rounds, those closest to the average."""
    runs = [tokens[at : at + count] for at in range(max(1, len(tokens) - count + 1))]
    return min(runs, key=lambda run: abs(fmean(run) - fmean(tokens)))


def _milliseconds(rounds: Sequence[Round]) -> dict[str, float]:
    """Returns the median time of each part."""
    return {part: 1e3 * median(getattr(one, part) for one in rounds) for part in PARTS}


def _draw_rounds(axes: Axes, row: int, parts: Mapping[str, float], excerpt: Sequence[int]) -> None:
    length = sum(parts.values())
    place, offset = (row - BAR_HEIGHT / 2, BAR_HEIGHT), 0.0
    for part, width in parts.items():
        bars = [(number * length + offset, width) for number in range(len(excerpt))]
        axes.broken_barh(bars, place, linewidth=0.8, label=part, **PART_STYLES[part])
        offset += width
    middle = parts["draft"] + parts["verify"] / 2
    for number, num_tokens in enumerate(excerpt):
        box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
        text = {"ha": "center", "va": "center", "fontsize": 8, "bbox": box}
        axes.text(number * length + middle, row, f"+{num_tokens}", **text)


def _draw_steps(axes: Axes, row: int, length: float, num_steps: int) -> None:
    bars = [(number * length, length) for number in range(num_steps)]
    place = row - BAR_HEIGHT / 2, BAR_HEIGHT
    axes.broken_barh(bars, place, linewidth=0.8, label="plain", **PART_STYLES["plain"])


def _show(figure: Figure) -> None:
    from IPython.display import Image, display

    file = io.BytesIO()
    figure.savefig(file, dpi=100)
    display(Image(file.getvalue()))
