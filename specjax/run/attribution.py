"""Attributes the tokens of a text to where in the context they were copied from (PLD+, appendix D).

A drafter that copies knows its source, so an accepted copy can be attributed to it:
`Generation.source` holds the position for each token. This module turns them into spans and an
HTML page.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Span(NamedTuple):
    """Output tokens `start` to `end` (exclusive), which repeat the text from position `source` on.

    `start` and `end` count from the first output token, `source` from the first prompt token.
    """

    start: int
    end: int
    source: int


def sources_in_prompt(source: Sequence[int], prompt_length: int) -> list[int]:
    """Replaces each source in the output by the prompt position that token came from, if any."""
    positions: list[int] = []
    for at in source:
        beyond = at - prompt_length
        positions.append(int(at) if beyond < 0 else positions[beyond])
    return positions


def spans_of(source: Sequence[int], min_tokens: int = 1) -> list[Span]:
    """Returns the maximal runs of at least `min_tokens` tokens with consecutive sources."""
    spans, start = [], 0
    for at in range(1, len(source) + 1):
        goes_on = at < len(source) and source[at - 1] >= 0 and source[at] == source[at - 1] + 1
        if not goes_on:
            if source[start] >= 0 and at - start >= min_tokens:
                spans.append(Span(start, at, int(source[start])))
            start = at
    return spans


@dataclass(frozen=True)
class Page:
    """Output and context side by side in one HTML file; hovering over a span shows its source."""

    prompt: Sequence[str]  # the text of each token
    output: Sequence[str]
    spans: Sequence[Span]

    def html(self) -> str:
        """Returns the page, which is self-contained."""
        sources = [range(span.source, span.source + span.end - span.start) for span in self.spans]
        context = "".join(
            _mark(text, [n for n, span in enumerate(sources) if at in span], at)
            for at, text in enumerate(self.prompt)
        )
        owner = {at: n for n, span in enumerate(self.spans) for at in range(span.start, span.end)}
        output = "".join(
            _mark(text, [owner[at]] if at in owner else []) for at, text in enumerate(self.output)
        )
        copied = len(owner)
        summary = f"{copied} of {len(self.output)} output tokens were copied from the context."
        return _PAGE.format(summary=summary, context=context, output=output)


def _mark(text: str, spans: list[int], position: int | None = None) -> str:
    classes = " ".join(f"s{number}" for number in spans)
    title = "" if position is None else f' title="position {position}"'
    kind = f' class="copied {classes}" data-spans="{classes}"' if spans else ""
    return f"<span{kind}{title}>{html.escape(text)}</span>"


_PAGE = """<!doctype html>
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
