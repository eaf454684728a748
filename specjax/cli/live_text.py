"""Shows text on a terminal as its tokens arrive."""

from itertools import groupby, islice
from operator import itemgetter

import numpy as np
from rich.console import Console

from specjax.core.text import EndingText, visible
from specjax.decoding.state import Generation

DRAFTED = "green"


class LiveText:
    """Prints a text as it grows; a terminal shows accepted draft tokens in colour."""

    def __init__(self, ending: EndingText, console: Console):
        self._ending, self._console = ending, console
        self._num_shown = 0
        self._drafted: list[bool] = []  # of each character, whether it was drafted

    def add(self, generation: Generation) -> None:
        """Prints the text that is new in `generation`."""
        length = int(generation.length[0])
        new = slice(self._ending.num_tokens, length)
        tokens = np.asarray(generation.tokens)[0, new]
        drafted = np.asarray(generation.from_draft)[0, new]
        for token, is_drafted in zip(tokens, drafted, strict=True):
            self._ending.add(int(token))
            self._drafted += [bool(is_drafted)] * (len(self._ending.text) - len(self._drafted))
        self._show(self._ending.num_settled)

    def finish(self) -> None:
        """Prints the rest and ends the line; call it for an interrupted text too."""
        self._ending.finish()
        self._drafted += [False] * (len(self._ending.text) - len(self._drafted))
        self._show(len(self._ending.text))
        self._print("\n", False)

    def _show(self, end: int) -> None:
        characters = zip(self._ending.text, self._drafted, strict=False)
        for is_drafted, part in groupby(islice(characters, self._num_shown, end), itemgetter(1)):
            self._print("".join(character for character, _ in part), is_drafted)
        self._num_shown = end

    def _print(self, text: str, is_drafted: bool) -> None:
        if self._console.is_terminal:
            style = DRAFTED if is_drafted else None
            self._console.out(visible(text), style=style, end="", highlight=False)
        else:
            self._console.file.write(text)
            self._console.file.flush()
