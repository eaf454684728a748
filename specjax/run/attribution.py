"""Attributes the tokens of a text to where in the context they were copied from (PLD+, appendix D).

A drafter that copies knows its source, so an accepted copy can be attributed to it:
`Generation.source` holds the position for each token. This module turns them into spans, an HTML
page, and scores for texts whose quotes are known.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from specjax.decoding.state import NO_SOURCE


class Span(NamedTuple):
    """Output tokens `start` to `end` (exclusive), which repeat the text from position `source` on.

    `start` and `end` count from the first output token, `source` from the first prompt token.
    """

    start: int
    end: int
    source: int


def sources_in_prompt(source: Sequence[int], prompt_length: int) -> list[int]:
    """Replaces each source in the output by the prompt position that token came from, if any."""
    found: list[int] = []
    for at in source:
        beyond = at - prompt_length
        found.append(int(at) if beyond < 0 else found[beyond])
    return found


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


def forced_sources(
    text: Sequence[int],
    prompt_length: int,
    states: Float[np.ndarray, "T D"],
    num_tokens: int = 70,
) -> list[int]:
    """Returns the sources that PLD+ (h) would report if the target had generated this output.

    `states` are the target's hidden states at every position. Only the prompt is searched and
    copied from.
    """
    tokens = np.asarray(text)
    unit = states / np.maximum(np.linalg.norm(states, axis=-1, keepdims=True), 1e-12)
    source = np.full(len(tokens), NO_SOURCE)
    root = prompt_length - 1
    while root < len(tokens):
        candidates = 1 + np.flatnonzero(tokens[1 : min(root, prompt_length)] == tokens[root])
        count = 0
        if len(candidates):
            best = int(candidates[np.argmax(unit[candidates - 1] @ unit[root - 1])])
            count = _num_same(tokens, best + 1, root + 1, min(num_tokens, prompt_length - best - 1))
        if count:
            source[root : root + count + 1] = np.arange(best, best + count + 1)
        root += count + 1
    return source[prompt_length:].tolist()


class Scores(NamedTuple):
    """Precision, recall and F1 of the tokens called copied, from 0 to 1."""

    precision: float
    recall: float
    f1: float


def score(found: Bool[np.ndarray, " n"], true: Bool[np.ndarray, " n"]) -> Scores:
    """Scores one text token by token; precision and recall are 1 where they would divide by 0."""
    both = int(np.sum(found & true))
    precision = both / np.sum(found) if found.any() else 1.0
    recall = both / np.sum(true) if true.any() else 1.0
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return Scores(float(precision), float(recall), float(f1))


def is_copied(source: Sequence[int], min_tokens: int) -> Bool[np.ndarray, " n"]:
    """Returns which tokens lie in spans of at least `min_tokens` tokens."""
    copied = np.zeros(len(source), bool)
    for span in spans_of(source, min_tokens):
        copied[span.start : span.end] = True
    return copied


def _num_same(tokens: Int[np.ndarray, " n"], first: int, second: int, limit: int) -> int:
    limit = min(limit, len(tokens) - second)
    differ = np.flatnonzero(tokens[first : first + limit] != tokens[second : second + limit])
    return int(differ[0]) if len(differ) else max(limit, 0)


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
