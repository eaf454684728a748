"""Prints text on a terminal as its tokens arrive."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import Console

from specjax.core.text import UNFINISHED, GrowingText
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
