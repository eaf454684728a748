"""Conversations as tokens, each marked as the assistant's or not.

The whole conversation is tokenized once. An answer is what follows the text up to where the
template lets the assistant begin, through the token with which the assistant ends its turn: just
what the model itself must say. Where a template writes something behind that token, such as a line
break, it belongs to nobody.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32

from specjax.core.chat import TRAINING_DAY, Message, chat_text, encode_chat, opening_ids
from specjax.core.errors import SpecjaxError
from specjax.training.conversations import (
    ASSISTANT,
    NUM_SHOWN,
    Complain,
    Conversation,
    to_stderr,
)

PLACEHOLDERS = range(0xE000, 0xF900)  # characters that Unicode leaves to private use

Span = tuple[int, int]  # from one character to before another


@dataclass(frozen=True, eq=False)
class Example:
    """T tokens of one text; `is_answer` marks those that the assistant says."""

    tokens: Int32[np.ndarray, " T"]
    is_answer: Bool[np.ndarray, " T"]


def tokenize_all(
    conversations: Iterable[Conversation],
    tokenizer: Any,
    longest: int,
    complain: Complain = to_stderr,
) -> list[Example]:
    """The examples of all conversations, but for those that the chat template refuses.

    Args:
        conversations: such as those of `read_conversations`.
        tokenizer: of `transformers`.
        longest: tokens after which an example is cut off.
        complain: told of the first refusals, and of their number.

    Raises:
        SpecjaxError: if the template refuses every conversation.
    """
    examples, refusals = [], []
    for number, conversation in enumerate(conversations, start=1):
        try:
            examples.append(tokenize(conversation, tokenizer, longest))
        except SpecjaxError as error:
            refusals.append(error)
            if len(refusals) <= NUM_SHOWN:
                complain(f"conversation {number} is left out: {error}")
    if refusals and not examples:
        raise SpecjaxError(f"no conversation is left: {refusals[0]}")
    if refusals:
        complain(f"{len(refusals)} of {number} conversations are left out by the chat template")
    return examples


def tokenize(conversation: Conversation, tokenizer: Any, longest: int) -> Example:
    """The tokens of a conversation in the tokenizer's chat template, or in Vicuna's.

    Args:
        conversation: what follows its last answer is left out; of a plain text all tokens count.
        tokenizer: of `transformers`; a slow one, which tells no offsets, is asked more often.
        longest: tokens after which the example is cut off.

    Raises:
        SpecjaxError: if the template refuses the turns, or writes a turn differently where more
            turns follow, so that what the model sees while it answers is not what stands before.
    """
    if conversation.text:
        ids = opening_ids(tokenizer, conversation.text)
        return _example(ids, [(0, len(ids))], longest)
    messages = _messages(conversation)
    text = chat_text(tokenizer, messages, today=TRAINING_DAY)
    spans = [
        _answer_span(tokenizer, text, messages, number)
        for number, message in enumerate(messages)
        if message["role"] == ASSISTANT
    ]
    locate = _with_offsets if tokenizer.is_fast else _with_prefixes
    return _example(*locate(tokenizer, text, spans), longest)


def _messages(conversation: Conversation) -> list[Message]:
    """The turns up to the last answer.

    Raises:
        SpecjaxError: if there is no answer, or it comes before any question.
    """
    messages: list[Message] = [
        {"role": turn.role, "content": turn.text} for turn in conversation.turns
    ]
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


def _answer_span(tokenizer: Any, text: str, messages: Sequence[Message], number: int) -> Span:
    """The characters of `text` that the model must say as message `number`."""
    before = chat_text(tokenizer, messages[:number], is_answer_next=True, today=TRAINING_DAY)
    # With another answer in its place, what follows the answer is the same and can be seen.
    other = next(mark for mark in map(chr, PLACEHOLDERS) if mark not in text)
    changed = [dict(message) for message in messages]
    changed[number]["content"] = other
    _, found, after = chat_text(tokenizer, changed, today=TRAINING_DAY).rpartition(other)
    end = len(text) - len(after)
    if not found or not text.startswith(before) or not text.endswith(after) or end < len(before):
        raise SpecjaxError(
            f"the tokenizer's chat template writes the answer in turn {number}, or what stands "
            "before it, differently when all turns are there; drop the turns after the first "
            "answer, or give the tokenizer a template that only appends"
        )
    end_token = _end_token(tokenizer).match(text, end)
    return len(before), end_token.end() if end_token else end


@lru_cache(maxsize=4)
def _end_token(tokenizer: Any) -> re.Pattern[str]:
    """What ends a turn right behind its text: EOS, or another special token but BOS."""
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
    """The tokens of `text`, and which of them end within each span."""
    encoding = encode_chat(tokenizer, text, return_offsets_mapping=True, verbose=False)
    starts, ends = np.asarray(encoding["offset_mapping"]).T
    marked = []
    for start, end in spans:
        # A token may have no width, such as a space that a tokenizer trims: hence first to last.
        within = np.flatnonzero((ends > starts) & (ends > start) & (ends <= end))
        if within.size:
            marked.append((int(within[0]), int(within[-1]) + 1))
    return encoding["input_ids"], marked


def _with_prefixes(
    tokenizer: Any, text: str, spans: Sequence[Span]
) -> tuple[Sequence[int], list[Span]]:
    """The same, from how many tokens the text up to each end of a span shares with the whole."""
    ids = encode_chat(tokenizer, text, verbose=False)["input_ids"]

    def tokens_before(character: int) -> int:
        prefix = encode_chat(tokenizer, text[:character], verbose=False)["input_ids"]
        count = min(len(ids), len(prefix))
        differing = np.flatnonzero(np.asarray(ids[:count]) != np.asarray(prefix[:count]))
        return int(differing[0]) if differing.size else count

    return ids, [(tokens_before(start), tokens_before(end)) for start, end in spans]
