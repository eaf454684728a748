"""From tokens to text, and to a terminal while they come in."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from specjax.decoding.state import Generation

DRAFTED = "green"
NUM_DECODED_AGAIN = 8  # tokens; what a token adds may depend on those before it
UNFINISHED = "\ufffd"  # what bytes decode to that are not, or not yet, a character
# A model may write any byte; on a terminal, control codes are shown, not obeyed.
VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
VISIBLE |= dict.fromkeys(range(0x7F, 0xA0), UNFINISHED)


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of `tokens` without special tokens; without a tokenizer, the ids."""
    if tokenizer is None:
        return " ".join(str(token) for token in tokens)
    return tokenizer.decode(
        list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


class GrowingText:
    """Text that gains one token at a time; a character appears once all its bytes are there.

    Only the last few tokens are decoded again, from one that began a whole character.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []  # the last ones
        self._num_shown = 0  # characters of their text

    def add(self, token: int) -> str:
        """The text that becomes certain with `token`."""
        self._tokens.append(token)
        whole = decode(self._tokenizer, self._tokens)
        fresh = self._fresh(whole.rstrip(UNFINISHED))
        if len(self._tokens) >= 2 * NUM_DECODED_AGAIN and not whole.endswith(UNFINISHED):
            self._forget()
        return fresh

    def finish(self) -> str:
        """What is left when no token follows."""
        return self._fresh(decode(self._tokenizer, self._tokens))

    def _fresh(self, text: str) -> str:
        fresh = text[self._num_shown :]
        self._num_shown = max(self._num_shown, len(text))
        return fresh

    def _forget(self) -> None:
        """Drops the older half, if what stays begins with a whole character."""
        kept = self._tokens[-NUM_DECODED_AGAIN:]
        text = decode(self._tokenizer, kept)
        if not text.startswith(UNFINISHED):
            self._tokens, self._num_shown = kept, len(text)


def show_live(generations: Iterator[Generation], tokenizer: Any, console: Console) -> None:
    """Prints the first row as it grows, drafted and accepted tokens in colour."""
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
    finally:  # an interrupted text, too, ends its line
        console.out("")
