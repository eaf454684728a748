"""Draws plain decoding and a drafting method while they generate one text, at their own speeds.

    python -m recipes.smollm2.race --target TARGET [--method NAME]

The animation, docs/results/race.svg, shows when the texts grew, in seconds as measured.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from operator import itemgetter
from textwrap import wrap
from typing import NamedTuple

from benchmarks.harness import main
from recipes.smollm2.page import ROOT
from specjax import SpecjaxError, load, stream_text
from specjax.bench.measure import PLAIN
from specjax.cli.environment import use_compilation_cache
from specjax.core.files import write_whole
from specjax.core.provenance import machine
from specjax.loading.targets import LoadedTarget

FILE = ROOT / "docs" / "results" / "race.svg"
TASK = "Correct the punctuation of this text, and return the whole text."
PROMPT = f"""{TASK}

The lighthouse stands on a rock two miles from the shore. Its keeper climbs the stairs every \
evening to light the lamp, and he writes the weather in a book. In winter the waves are so high \
that no boat can land, and he has to live on what he has stored."""
COLUMNS, LINE, WIDTH = 54, 16, 400  # characters of a line; its height, and a panel's width
PAUSE = 2.0  # seconds until the animation restarts


@dataclass(frozen=True)
class Options:
    """Measure a race between plain decoding and a method, and draw it."""

    target: str
    method: str = "pld-plus"
    max_new_tokens: int = 160


class Run(NamedTuple):
    """The text that a method generated."""

    name: str
    pieces: list[tuple[float, str]]  # seconds since the start, and the text that came then
    num_tokens: int

    @property
    def seconds(self) -> float:
        return self.pieces[-1][0]


def run(options: Options) -> None:
    """Measures the two runs and writes the animation."""
    use_compilation_cache()
    target = load(options.target)
    runs = [measure(target, method, options) for method in (PLAIN, options.method)]
    if len({"".join(text for _, text in run.pieces) for run in runs}) > 1:
        raise SpecjaxError(f"{options.method} generated a different text from plain decoding")
    write_whole(FILE, drawing(runs, machine()).encode())


def measure(target: LoadedTarget, method: str, options: Options) -> Run:
    """Generates the text twice, first to compile, and returns the second run."""
    settings = {"chat": True, "max_new_tokens": options.max_new_tokens, "rounds_per_call": 4}
    for _ in range(2):
        pieces, length, start = [], 0, time.perf_counter()
        for part in stream_text(target, PROMPT, method, **settings):
            pieces.append((time.perf_counter() - start, part.text[length:]))
            length = len(part.text)
    return Run(method, pieces, len(part.tokens))


def drawing(runs: Sequence[Run], device: str) -> str:
    """Returns the animation of plain decoding and another run, side by side, as SVG."""
    whole, panels = max(run.seconds for run in runs) + PAUSE, [lines_of(run) for run in runs]
    height = LINE * (8 + max(map(len, panels)))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {height}" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="11" fill="#d8dee9">',
        f'<rect width="{2 * WIDTH}" height="{height}" rx="8" fill="#20242c"/>',
    ]
    parts.append(f'<text x="{LINE}" y="{2 * LINE}">&gt; {TASK}</text>')
    for number, (run, lines) in enumerate(zip(runs, panels, strict=True)):
        left = number * WIDTH + LINE
        name = f"{run.name}: {run.num_tokens / run.seconds:.0f} tokens/s"
        parts.append(f'<text x="{left}" y="{4 * LINE}" fill="#88c0d0">{name}</text>')
        for row, line in enumerate(lines):
            spans = "".join(_span(text, seconds / whole, whole) for seconds, text in line)
            place = f'x="{left}" y="{(6 + row) * LINE}" style="white-space: pre"'
            parts.append(f"<text {place}>{spans}</text>")
    same = f"the same {runs[0].num_tokens} tokens, prefill included"
    note = f"SmolLM2-135M-Instruct on {device}; {same}"
    parts.append(f'<text x="{LINE}" y="{height - LINE}" fill="#8a93a3">{note}</text>')
    return "\n".join([*parts, "</svg>\n"])


def lines_of(run: Run) -> list[list[tuple[float, str]]]:
    """Returns the text in lines of at most `COLUMNS` characters, in pieces with their times."""
    times = [seconds for seconds, piece in run.pieces for _ in piece]
    text = "".join(piece for _, piece in run.pieces)
    lines, place = [], 0
    for words in wrap(text, COLUMNS, expand_tabs=False, drop_whitespace=False):
        timed = zip(times[place:], words, strict=False)
        pieces = groupby(timed, key=itemgetter(0))
        lines.append([(seconds, "".join(word for _, word in part)) for seconds, part in pieces])
        place += len(words)
    return [*lines, [(run.seconds, f"({run.seconds:.1f} s)")]]


def _span(text: str, share: float, whole: float) -> str:
    """Returns a piece of text that appears after a share of the animation."""
    times = f'keyTimes="0;{share:.4f}" dur="{whole:.2f}s" repeatCount="indefinite"'
    shown = f'<animate attributeName="fill-opacity" values="0;1" calcMode="discrete" {times}/>'
    return f"<tspan>{escape(text)}{shown}</tspan>"


if __name__ == "__main__":
    main(run, Options, __doc__)
