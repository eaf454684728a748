"""Helpers for notebooks: pick a target that fits the machine, and draw texts and rounds."""

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from specjax.cli import main
from specjax.core.errors import SpecjaxError
from specjax.core.memory import num_bytes
from specjax.core.text import token_texts
from specjax.decoding.drafter import Drafter, Params, Proposal
from specjax.decoding.engine import Engine
from specjax.decoding.prompt import Prompt
from specjax.decoding.state import Generation, LoopState
from specjax.decoding.tree import DraftTree, Verification
from specjax.loading.hub import POCKET
from specjax.loading.targets import LoadedTarget
from specjax.loading.targets import load as load_target
from specjax.run.attribution import Page, sources_in_prompt, spans_of

if TYPE_CHECKING:
    from IPython.display import HTML

TARGETS = {  # numbers in the weights; the largest that fits is taken
    "Qwen/Qwen2.5-7B-Instruct": 7.6e9,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1.7e9,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 0.36e9,
}
SHARE = 0.5  # of the memory, for the weights
KINDS = {  # kind of node: marker, area, fill, edge, sign inside, sign's colour
    "root": ("s", 420, "black", "black", "R", "white"),
    "accepted": ("o", 460, "tab:blue", "black", "✓", "white"),
    "rejected": ("o", 460, "white", "dimgray", "✗", "dimgray"),
    "bonus": ("D", 330, "gold", "black", "+", "black"),
}
VISIBLE = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥"})
DRAFTED = "background: rgba(46, 160, 67, 0.25); text-decoration: underline"
HATCHES = ("", "//", "..", "xx", "\\\\", "++")


# ---- The machine -------------------------------------------------------------------------------


def fitting(memory: int | None) -> tuple[str, str | None]:
    """Returns the target for a device with this many bytes, and "int8" if only that fits.

    The weights may take half of the memory. A CPU, whose memory is None, gets pocket.
    """
    for name, size in TARGETS.items():
        for num_bytes_each, quantize in ((2, None), (1, "int8")):
            if memory is not None and size * num_bytes_each <= SHARE * memory:
                return name, quantize
    return POCKET, None


def load(name: str | None = None, **options: Any) -> LoadedTarget:
    """Loads a target, by default the one that fits this machine, and says which and why.

    Args:
        name: as in `specjax.load`.
        options: of `specjax.load`.

    Raises:
        SpecjaxError: as `specjax.load` does.
    """
    device = jax.devices()[0]
    memory = (device.memory_stats() or {}).get("bytes_limit") if device.platform != "cpu" else None
    if name is None:
        name, quantize = fitting(memory)
        options = {"quantize": quantize, **options}
    target = load_target(name, **options)
    size = f", {memory / 1e9:.0f} GB" if memory else ""
    print(f"{device.platform.upper()} ({device.device_kind}{size})")
    print(f"{name} in {target.dtype_name}, {num_bytes(target.params) / 1e6:,.0f} MB of weights")
    return target


def command(line: str) -> None:
    """Runs a command line of specjax in this process: `command("bench --limit 2")`.

    Raises:
        SpecjaxError: if the command fails; its message is printed above.
    """
    if main(shlex.split(line)):
        raise SpecjaxError(f"`specjax {line}` failed; see its message above")


# ---- Texts -------------------------------------------------------------------------------------


def new_tokens(generation: Generation, row: int = 0) -> list[int]:
    """Returns the new tokens of a row."""
    return generation.tokens[row, : generation.length[row]].tolist()


def drafted_text(target: LoadedTarget, generation: Generation) -> "HTML":
    """Returns the first row's text, with drafted and accepted tokens underlined."""
    from IPython.display import HTML

    texts = token_texts(target.tokenizer, new_tokens(generation))
    from_draft = generation.from_draft[0].tolist()
    pairs = zip(texts, from_draft, strict=False)
    body = "".join(
        _marked("".join(text for text, _ in run), is_drafted)
        for is_drafted, run in groupby(pairs, key=lambda pair: pair[1])
    )
    legend = f"{_marked('drafted and accepted', True)} &nbsp; the target's own"
    return HTML(f'<p>{legend}</p><pre style="white-space: pre-wrap">{body}</pre>')


def sources_of(target: LoadedTarget, prompt: Prompt, generation: Generation) -> "HTML":
    """Returns prompt and output side by side; hovering over a copy shows its source."""
    ids = prompt.tokens[0, : prompt.length[0]].tolist()
    tokens = new_tokens(generation)
    source = sources_in_prompt(generation.source[0, : len(tokens)].tolist(), len(ids))
    shown, written = (token_texts(target.tokenizer, each) for each in (ids, tokens))
    return framed(Page(shown, written, spans_of(source)).html())


def framed(page: str, height: int = 480) -> "HTML":
    """Shows a whole HTML page in a frame of its own."""
    from IPython.display import HTML

    style = f"width: 100%; height: {height}px; border: 1px solid #ccc"
    return HTML(f'<div><iframe srcdoc="{escape(page)}" style="{style}"></iframe></div>')


def _marked(text: str, is_drafted: bool) -> str:
    return f'<span style="{DRAFTED}">{escape(text)}</span>' if is_drafted else escape(text)


# ---- Rounds ------------------------------------------------------------------------------------


class Round(NamedTuple):
    """One round of a single text: its tree, what was accepted, and the seconds of both parts."""

    tree: DraftTree
    verification: Verification
    draft_seconds: float
    verify_seconds: float  # the target pass, the commit, and the drafter's update

    @property
    def num_tokens(self) -> int:
        """The tokens it added, bonus included."""
        return int(self.verification.num_accepted[0]) + 1


def rounds_of(
    target: LoadedTarget,
    drafter: Drafter,
    drafter_params: Any,
    prompt: Prompt,
    max_new_tokens: int = 256,
) -> list[Round]:
    """Continues a prompt greedily, one round at a time; the first call compiles."""
    engine = Engine(target.model, drafter, max_new_tokens=max_new_tokens, eos=target.eos)
    params = Params(target.params, drafter_params)
    for _ in range(2):  # the first time compiles
        state, found = engine.prefill(params, prompt, jax.random.key(0)), []
        while not state.is_done.all():
            started = time.perf_counter()
            state, proposal = jax.block_until_ready(_propose(engine, params, state))
            drafted = time.perf_counter()
            state, verification = jax.block_until_ready(_verify(engine, params, state, proposal))
            verified = time.perf_counter()
            tree, verification = jax.device_get((proposal.tree, verification))
            found.append(Round(tree, verification, drafted - started, verified - drafted))
    return found


@partial(jax.jit, static_argnums=0)
def _propose(engine: Engine, params: Params, state: LoopState) -> tuple[LoopState, Proposal]:
    return engine.propose(params, state)


@partial(jax.jit, static_argnums=0)
def _verify(
    engine: Engine, params: Params, state: LoopState, proposal: Proposal
) -> tuple[LoopState, Verification]:
    output, verification, cache = engine.verify(params, state, proposal)
    state = replace(state, cache=cache)
    return engine.commit(params, state, proposal.tree, output, verification), verification


def most_telling(rounds: Sequence[Round]) -> Round:
    """Returns a round that has both accepted and rejected nodes, if there is one."""

    def mixture(each: Round) -> tuple[int, int]:
        kinds = [node[3] for node in _nodes(each)]
        return min(kinds.count("accepted"), kinds.count("rejected")), len(kinds)

    return max(rounds, key=mixture)


def draw_round(target: LoadedTarget, each: Round) -> None:
    """Draws the draft tree of a round, and the bonus token."""
    import matplotlib.pyplot as plt

    nodes = _nodes(each)
    rows = _rows(nodes)
    depth = max(node[1] for node in nodes)
    figure, axes = plt.subplots(
        figsize=(max(7, 0.9 * depth + 1.5), 0.62 * max(rows.values()) + 1.7)
    )
    for node, (parent, column, token, kind) in enumerate(nodes):
        marker, area, fill, edge, sign, sign_colour = KINDS[kind]
        if node > 0:
            ends = [nodes[parent][1], column], [-rows[parent], -rows[node]]
            axes.plot(*ends, "--" if kind == "rejected" else "-", color=edge, zorder=1)
        at = column, -rows[node]
        axes.scatter(*at, s=area, marker=marker, color=fill, edgecolor=edge, zorder=2)
        axes.text(*at, sign, color=sign_colour, ha="center", va="center", fontsize=12)
        text = target.tokenizer.decode([token]).translate(VISIBLE)
        below: dict[str, Any] = {"xytext": (0, -17), "textcoords": "offset points"}
        below |= {"ha": "center", "va": "top", "family": "monospace", "parse_math": False}
        below["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.annotate(text if len(text) <= 9 else text[:8] + "…", at, **below)
    for kind, (marker, _, fill, edge, sign, _) in KINDS.items():
        label = f"{sign} {kind}"
        axes.scatter([], [], s=90, marker=marker, color=fill, edgecolor=edge, label=label)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(KINDS), frameon=False)
    axes.set(xlim=(-0.6, depth + 0.6), ylim=(-max(rows.values()) - 0.7, 0.4))
    axes.axis("off")
    figure.tight_layout()
    plt.show()


def _nodes(each: Round) -> list[tuple[int, int, int, str]]:
    """Returns parent, depth, token and kind of every node; the bonus comes last."""
    tree, verification = each.tree, each.verification
    path = verification.path[0][: int(verification.num_accepted[0]) + 1].tolist()
    count = int(tree.num_valid()[0])
    kinds = ["accepted" if node in path else "rejected" for node in range(count)]
    kinds[0] = "root"
    columns = (column[0][:count].tolist() for column in (tree.parents, tree.depth, tree.tokens))
    bonus = path[-1], len(path), int(verification.bonus[0]), "bonus"
    return [*zip(*columns, kinds, strict=True), bonus]


def _rows(nodes: Sequence[tuple[int, int, int, str]]) -> dict[int, int]:
    """Returns the line of each node: the path's is the first, and no two branches cross."""
    rows, last = {0: 0}, 0
    waiting = [0]
    while waiting:
        node = waiting.pop()
        if node not in rows:
            last += 1
            rows[node] = last
        children = [each for each in range(1, len(nodes)) if nodes[each][0] == node]
        children.sort(key=lambda each: nodes[each][3] == "rejected")
        rows |= dict.fromkeys(children[:1], rows[node])  # it goes on in its parent's line
        waiting += reversed(children)
    return rows


# ---- Charts ------------------------------------------------------------------------------------


def draw_bars(values: Mapping[str, float], label: str, form: str = "{:.2f}") -> None:
    """Draws a bar for each value, with the value at its end."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 0.8 + 0.5 * len(values)))
    hatch = [HATCHES[number % len(HATCHES)] for number in range(len(values))]
    names = list(values)
    bars = axes.barh(
        names, list(values.values()), color="lightgray", hatch=hatch, edgecolor="black"
    )
    axes.bar_label(bars, [form.format(value) for value in values.values()], padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    plt.show()


def draw_timeline(methods: Mapping[str, Sequence[Round]], num_rounds: int = 5) -> None:
    """Draws the first rounds of each method over time: draft, then verify, and tokens added.

    Their bars are as long as the medians over all rounds.
    """
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.8 * len(methods)))
    styles: tuple[dict[str, Any], ...] = (
        {"facecolor": "gold", "hatch": "//", "label": "draft"},
        {"facecolor": "tab:blue", "label": "verify and commit"},
    )
    for row, rounds in enumerate(methods.values()):
        at = 0.0
        drafting = median(each.draft_seconds for each in rounds)
        widths = 1e3 * drafting, 1e3 * median(each.verify_seconds for each in rounds)
        for each in rounds[:num_rounds]:
            for width, style in zip(widths, styles, strict=True):
                axes.barh(row, width, left=at, height=0.6, edgecolor="black", **style)
                at += width
            axes.text(at - widths[1] / 2, row, f"+{each.num_tokens}", ha="center", va="center")
    axes.set_yticks(range(len(methods)), list(methods))
    axes.invert_yaxis()
    axes.set_xlabel("ms; the number on a round: tokens added")
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(
        unique.values(), unique.keys(), loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    plt.show()
