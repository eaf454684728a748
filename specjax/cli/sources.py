"""`specjax generate --attribute`: shows which part of the prompt each part of the output copies."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specjax.attribution import Page, Span, sources_in_prompt, spans_of
from specjax.core.files import expand_user, writable
from specjax.core.text import token_texts


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
