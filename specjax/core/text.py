"""Text of tokens, all at once or one at a time, and text that is safe to print on a terminal."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

NUM_DECODED_AGAIN = 8  # tokens of context: the text of a token may depend on those before it
UNFINISHED = "\ufffd"  # stands for bytes that are not, or not yet, a character
# Models, their files and prompts may hold any character: a terminal shows control characters
# instead of obeying them.
VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
VISIBLE |= dict.fromkeys(
    (*range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\ufffd"
)


def visible(text: str) -> str:
    """Replaces control characters, except for line ends and tabs, by characters that show them."""
    return text.translate(VISIBLE)


def safe_console(**options: Any) -> "Console":
    """Returns a console that prints text without markup, with control characters made visible."""
    from rich.console import Console

    class SafeConsole(Console):
        def render_str(self, text: str, **options: Any) -> Any:
            return super().render_str(visible(text), **options)

    return SafeConsole(markup=False, highlight=False, **options)


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Returns the text of `tokens` without special tokens; without a tokenizer, their ids."""
    if tokenizer is None:
        return " ".join(str(token) for token in tokens)
    return tokenizer.decode(
        list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def token_ids(tokenizer: Any, words: Iterable[str | Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens of words, as they stand alone and after a space; ids stay as they are."""
    ids = []
    for word in words:
        forms = (word, f" {word}") if isinstance(word, str) else ()
        ids += [tokenizer(form, add_special_tokens=False)["input_ids"] for form in forms] or [word]
    return tuple(dict.fromkeys(map(tuple, ids)))


def num_equal(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Returns the number of tokens that two texts both begin with."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(tokens), len(others)))


def token_texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Returns the text that each token adds; a character belongs to the token that completes it."""
    growing = GrowingText(tokenizer)
    texts = [growing.add(token) for token in tokens]
    return [*texts[:-1], texts[-1] + growing.finish()] if texts else []


class GrowingText:
    """Decodes a text one token at a time; a character appears once all its bytes are there.

    Only the last few tokens are decoded again, starting at a character boundary. `before` are the
    tokens that the text continues: without them SentencePiece drops the space of the first word.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []  # the last ones
        self._num_shown = 0  # characters of their text
        if before and tokenizer is not None:
            text = decode(tokenizer, before[-1:])
            if not text.startswith(UNFINISHED):
                self._tokens, self._num_shown = [before[-1]], len(text.rstrip(UNFINISHED))

    def add(self, token: int) -> str:
        """Returns the text that `token` completes."""
        self._tokens.append(token)
        whole = decode(self._tokenizer, self._tokens)
        fresh = self._fresh(whole.rstrip(UNFINISHED))
        if len(self._tokens) >= 2 * NUM_DECODED_AGAIN and not whole.endswith(UNFINISHED):
            kept = self._tokens[-NUM_DECODED_AGAIN:]  # if they begin at a character boundary
            text = decode(self._tokenizer, kept)
            if not text.startswith(UNFINISHED):
                self._tokens, self._num_shown = kept, len(text)
        return fresh

    def finish(self) -> str:
        """Returns the rest of the text; call it when no token follows."""
        return self._fresh(decode(self._tokenizer, self._tokens))

    def _fresh(self, text: str) -> str:
        fresh = text[self._num_shown :]
        self._num_shown = max(self._num_shown, len(text))
        return fresh


class EndingText:
    """A text that grows by tokens and ends before the first of some stop texts."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), before: Sequence[int] = ()):
        self._growing, self._stops = GrowingText(tokenizer, before), stops
        self.text = ""
        self.num_tokens = 0  # up to the one that completes a stop text
        self.records: list[dict[str, Any]] = []  # of log-probabilities, if requested
        self.is_stopped = False

    def add(self, token: int) -> None:
        """Adds a token; ignores it if the text has ended."""
        if not self.is_stopped:
            self.num_tokens += 1
            self._append(self._growing.add(token))

    def finish(self) -> None:
        """Adds the rest of the text; call it when no token follows."""
        if not self.is_stopped:
            self._append(self._growing.finish())

    @property
    def num_settled(self) -> int:
        """Characters that stay, whatever follows: the others may begin a stop text."""
        if self.is_stopped:
            return len(self.text)
        begun = (
            length
            for stop in self._stops
            for length in range(1, min(len(stop), len(self.text) + 1))
            if self.text.endswith(stop[:length])
        )
        return len(self.text) - max(begun, default=0)

    def _append(self, fresh: str) -> None:
        self.text, old = self.text + fresh, len(self.text)
        places = [self.text.find(stop, max(0, old - len(stop) + 1)) for stop in self._stops]
        if ends := [place for place in places if place >= 0]:
            self.text, self.is_stopped = self.text[: min(ends)], True
