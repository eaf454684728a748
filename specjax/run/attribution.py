"""Attributes the tokens of a text to where in the context they were copied from (PLD+, appendix D).

A drafter that copies knows its source, so an accepted copy can be attributed to it:
`Generation.source` holds the position for each token. This module turns them into spans.
"""

from collections.abc import Sequence
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
