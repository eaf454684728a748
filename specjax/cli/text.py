"""Shows text on a terminal: as its tokens arrive, and where each part was copied from."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from specjax.attribution import Page, Span, sources_in_prompt, spans_of
from specjax.core.files import expand_user, writable
from specjax.core.text import UNFINISHED, GrowingText, token_texts
from specjax.decoding.state import Generation

DRAFTED = "green"
# A model may write any byte; show control codes instead of sending them to the terminal.
VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
VISIBLE |= dict.fromkeys(range(0x7F, 0xA0), UNFINISHED)


def show_live(generations: Iterator[Generation], tokenizer: Any, console: Console) -> None:
    """Prints the first row as it grows, with accepted draft tokens in colour."""
    growing = GrowingText(tokenizer)
    num_shown = 0

    def show(text: str, is_drafted: bool) -> None:
        if text:
            style = DRAFTED if is_drafted else None
            console.out(text.translate(VISIBLE), style=style, end="", highlight=False)

    try:
        for generation in generations:
            length = int(generation.length[0])
            tokens = np.asarray(generation.tokens)[0, num_shown:length]
            drafted = np.asarray(generation.from_draft)[0, num_shown:length]
            for token, is_drafted in zip(tokens, drafted, strict=True):
                show(growing.add(int(token)), bool(is_drafted))
            num_shown = length
        show(growing.finish(), False)
    finally:  # end the line of an interrupted text too
        console.out("")


def spans_in_prompt(source: Sequence[int], prompt_length: int) -> list[Span]:
    """Returns the copied spans, each with its original source in the prompt."""
    return spans_of(sources_in_prompt(source, prompt_length))


def show_sources(
    tokenizer: Any, tokens: Sequence[int], spans: Sequence[Span], console: Console
) -> None:
    """Prints the output part by part, with positions in output and prompt, both from 0."""
    texts = token_texts(tokenizer, tokens)
    table = Table("output", "source", "text", box=None, pad_edge=False)
    for start, end, source in _parts(spans, len(tokens)):
        place = "" if source is None else _range(source, source + end - start)
        table.add_row(_range(start, end), place, repr("".join(texts[start:end]))[1:-1])
    console.print(table)


def write_page(
    path: Path,
    tokenizer: Any,
    prompt: Sequence[int],
    tokens: Sequence[int],
    spans: Sequence[Span],
) -> None:
    """Writes the HTML page of the sources."""
    page = Page(token_texts(tokenizer, prompt), token_texts(tokenizer, tokens), spans)
    path = expand_user(path)
    with writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page.html(), encoding="utf-8")


def _parts(spans: Sequence[Span], length: int) -> Iterator[tuple[int, int, int | None]]:
    """Yields the output in order: spans and the parts between them."""
    end = 0
    for span in spans:
        if end < span.start:
            yield end, span.start, None
        yield span
        end = span.end
    if end < length:
        yield end, length, None


def _range(start: int, end: int) -> str:
    return str(start) if end == start + 1 else f"{start}-{end - 1}"
