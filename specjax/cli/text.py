"""Shows text on a terminal: as its tokens arrive, and where each part was copied from."""

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from specjax.core.files import expand_user, writable
from specjax.core.text import UNFINISHED, GrowingText, token_texts
from specjax.decoding.state import Generation
from specjax.run.attribution import Page, Span, sources_in_prompt, spans_of

DRAFTED = "green"
# A model may write any byte; show control codes instead of sending them to the terminal.
VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
VISIBLE |= dict.fromkeys(range(0x7F, 0xA0), UNFINISHED)


class LiveText:
    """Prints a text as it grows; a terminal shows accepted draft tokens in colour.

    What may be the beginning of a stop text is held back until it is known.
    """

    def __init__(self, tokenizer: Any, console: Console, stops: Sequence[str] = ()):
        self._growing, self._console, self._stops = GrowingText(tokenizer), console, stops
        self._num_tokens = self._num_shown = 0
        self._text, self._drafted = "", []  # of each character, whether it was drafted

    def add(self, generation: Generation) -> None:
        """Prints the text that is new in `generation`."""
        length = int(generation.length[0])
        tokens = np.asarray(generation.tokens)[0, self._num_tokens : length]
        drafted = np.asarray(generation.from_draft)[0, self._num_tokens : length]
        for token, is_drafted in zip(tokens, drafted, strict=True):
            self._append(self._growing.add(int(token)), bool(is_drafted))
        self._num_tokens = length
        self._show(len(self._text) - max(map(len, self._stops), default=1) + 1)

    def finish(self) -> None:
        """Prints the rest and ends the line; call it for an interrupted text too."""
        self._append(self._growing.finish(), False)
        self._show(len(self._text))
        self._print("\n", False)

    def _append(self, text: str, is_drafted: bool) -> None:
        self._text += text
        self._drafted += [is_drafted] * len(text)

    def _show(self, end: int) -> None:
        ends = (self._text.find(stop) for stop in self._stops)
        end = max(min([end, *(place for place in ends if place >= 0)]), self._num_shown)
        characters = zip(self._text, self._drafted, strict=True)
        for is_drafted, part in groupby(islice(characters, self._num_shown, end), itemgetter(1)):
            self._print("".join(character for character, _ in part), is_drafted)
        self._num_shown = end

    def _print(self, text: str, is_drafted: bool) -> None:
        if self._console.is_terminal:
            style = DRAFTED if is_drafted else None
            self._console.out(text.translate(VISIBLE), style=style, end="", highlight=False)
        else:
            self._console.file.write(text)
            self._console.file.flush()


def spans_in_prompt(source: Sequence[int], prompt_length: int) -> list[Span]:
    """Returns the copied spans, each with its original source in the prompt."""
    return spans_of(sources_in_prompt(source, prompt_length))


def show_sources(
    tokenizer: Any, tokens: Sequence[int], spans: Sequence[Span], console: Console
) -> None:
    """Prints the output part by part, with positions in output and prompt, both from 0."""
    texts = token_texts(tokenizer, tokens)
    table = Table("output tokens", "copied from", "text", box=None, pad_edge=False)
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
