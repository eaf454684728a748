"""Tokenizes conversations and marks the tokens of the assistant.

The whole conversation is tokenized once. An answer begins where the template lets the assistant
begin, and ends with the token that ends its turn: exactly the tokens that the model must generate.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int32

from specjax.core.chat import FIXED_DAY, Message, chat_text, encode_chat, opening_ids
from specjax.core.errors import SpecjaxError
from specjax.core.text import num_equal
from specjax.data.conversations import ASSISTANT, Conversation, messages_of
from specjax.data.records import Record, good_records

PLACEHOLDERS = range(0xE000, 0xF900)  # characters for private use

Span = tuple[int, int]  # from one character to before another


@dataclass(frozen=True, eq=False)
class Example:
    """T tokens of one text; `is_answer` marks those of the assistant."""

    tokens: Int32[np.ndarray, " T"]
    is_answer: Bool[np.ndarray, " T"]
    hidden: Float[np.ndarray, "T F"] | None = None  # the target's states: see `kept_states`

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by their names."""
        return {name: value for name, value in vars(self).items() if value is not None}


def tokenize_all(
    conversations: Iterable[Conversation], tokenizer: Any, longest: int
) -> list[Example]:
    """Tokenizes all conversations that the chat template accepts; warns about the others."""
    records = (Record(f"conversation {n}:", chat) for n, chat in enumerate(conversations, 1))
    convert = partial(tokenize, tokenizer=tokenizer, longest=longest)
    expected = "conversation that the chat template accepts; give other data, or another template"
    return list(good_records("--data", records, convert, expected))


def tokenize(conversation: Conversation, tokenizer: Any, longest: int) -> Example:
    """Tokenizes a conversation in the tokenizer's chat template, or in Vicuna's.

    Turns after the last answer are dropped; in a plain text all tokens count. The end token of an
    answer that is cut is not marked. Raises SpecjaxError for a template that rejects the turns, or
    writes a turn differently when more turns follow: training and decoding would then differ.
    """
    if conversation.text:
        ids = opening_ids(tokenizer, conversation.text)
        return _example(ids, [(0, len(ids))], longest)
    messages = _messages(conversation)
    text = chat_text(tokenizer, messages, today=FIXED_DAY)
    spans = [
        _answer_span(tokenizer, text, messages, number, conversation.is_cut)
        for number, message in enumerate(messages)
        if message["role"] == ASSISTANT
    ]
    locate = _with_offsets if tokenizer.is_fast else _with_prefixes
    return _example(*locate(tokenizer, text, spans), longest)


def _messages(conversation: Conversation) -> list[Message]:
    """Returns the turns up to the last answer."""
    messages = messages_of(conversation.turns)
    while messages and messages[-1]["role"] != ASSISTANT:
        messages.pop()
    if not messages or messages[0]["role"] == ASSISTANT:
        raise SpecjaxError("the conversation has no question with an answer; add one, or drop it")
    return messages


def _example(ids: Sequence[int], marked: Iterable[Span], longest: int) -> Example:
    tokens = np.asarray(ids[:longest], np.int32)
    is_answer = np.zeros(tokens.shape, bool)
    for first, end in marked:
        is_answer[first:end] = True
    return Example(tokens, is_answer)


# ---- Characters ----------------------------------------------------------------------------------


def _answer_span(
    tokenizer: Any, text: str, messages: Sequence[Message], number: int, is_cut: bool
) -> Span:
    """Finds the characters of `text` that the model must generate as message `number`."""
    before = chat_text(tokenizer, messages[:number], is_answer_next=True, today=FIXED_DAY)
    # With a placeholder for the answer, the text after it is the same and can be located.
    placeholder = next(mark for mark in map(chr, PLACEHOLDERS) if mark not in text)
    changed = [dict(message) for message in messages]
    changed[number]["content"] = placeholder
    _, mark, after = chat_text(tokenizer, changed, today=FIXED_DAY).rpartition(placeholder)
    end = len(text) - len(after)
    if not mark or not text.startswith(before) or not text.endswith(after) or end < len(before):
        raise SpecjaxError(
            f"the tokenizer's chat template writes the answer in turn {number}, or the text before "
            "it, differently when more turns follow; drop the turns after the first answer, or "
            "give the tokenizer a template that only appends"
        )
    if is_cut and number == len(messages) - 1:
        return len(before), end
    end_token = _end_token(tokenizer).match(text, end)
    return len(before), end_token.end() if end_token else end


@lru_cache(maxsize=4)
def _end_token(tokenizer: Any) -> re.Pattern[str]:
    """Matches the end of a turn after its text: EOS, or any special token except BOS."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special |= set(tokenizer.all_special_tokens)
    special -= {tokenizer.bos_token} - {tokenizer.eos_token}
    others = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    eos = re.escape(tokenizer.eos_token) if tokenizer.eos_token else "(?!)"
    return re.compile(rf"\s*{eos}| *(?:{others or '(?!)'})")


# ---- Tokens --------------------------------------------------------------------------------------


def _with_offsets(
    tokenizer: Any, text: str, spans: Sequence[Span]
) -> tuple[Sequence[int], list[Span]]:
    """Returns the tokens of `text`, and the range of those that end within each span."""
    encoding = encode_chat(tokenizer, text, return_offsets_mapping=True, verbose=False)
    starts, ends = np.asarray(encoding["offset_mapping"]).T
    marked = []
    for start, end in spans:
        # A token may have no width, such as a space that a tokenizer trims: hence first to last.
        inside = np.flatnonzero((ends > starts) & (ends > start) & (ends <= end))
        if inside.size:
            marked.append((int(inside[0]), int(inside[-1]) + 1))
    return encoding["input_ids"], marked


def _with_prefixes(
    tokenizer: Any, text: str, spans: Sequence[Span]
) -> tuple[Sequence[int], list[Span]]:
    """Does the same by tokenizing the text up to each end of a span."""
    ids = encode_chat(tokenizer, text, verbose=False)["input_ids"]

    def tokens_before(character: int) -> int:
        prefix = encode_chat(tokenizer, text[:character], verbose=False)["input_ids"]
        return num_equal(ids, prefix)

    return ids, [(tokens_before(start), tokens_before(end)) for start, end in spans]


def frequent_tokens(
    examples: Iterable[Example], vocab_size: int, count: int
) -> tuple[Int32[np.ndarray, " R"], float]:
    """Returns the most frequent tokens of the answers, and the share of the answers they cover.

    Ties go to low ids, which were merged early when the tokenizer was trained.
    """
    counts = np.zeros(vocab_size, np.int64)
    for example in examples:
        counts += np.bincount(example.tokens[example.is_answer], minlength=vocab_size)
    tokens = np.sort(np.argsort(-counts, kind="stable")[:count]).astype(np.int32)
    return tokens, float(counts[tokens].sum() / max(counts.sum(), 1))
