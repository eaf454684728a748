"""Reads training conversations from JSONL files, JSON lists, text files and hub datasets.

Every line may have one of these forms:

    {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}   ShareGPT
    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", ...}]}          OpenAI
    {"instruction": ..., "input": ..., "output": ...}                                     Alpaca
    {"prompt": ..., "response": ...}    or "completion"
    {"text": ...}                       plain text

A `.txt` or `.md` file is plain text, cut at blank lines. `"is_cut": true` beside one of these forms
says that the last answer is unfinished.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from specjax.core.chat import Message
from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user, read_text
from specjax.data.records import TURN_KEYS, Record, content_text, good_records, read_records

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
ROLES = {  # as files have them
    **dict.fromkeys((SYSTEM, "developer"), SYSTEM),
    **dict.fromkeys((USER, "human"), USER),
    **dict.fromkeys((ASSISTANT, "gpt", "chatgpt", "bot", "model"), ASSISTANT),
}
TEXT_SUFFIXES = (".txt", ".md")
PART_CHARACTERS = 4000  # minimum length of a part of a text file, which is cut at blank lines
MIN_PARTS = 20  # a file too short for that is cut into about this many


class Turn(NamedTuple):
    """One message; `role` is system, user or assistant."""

    role: str
    text: str


@dataclass(frozen=True)
class Conversation:
    """A chat (loss on assistant turns) or a plain text (loss on all tokens)."""

    turns: tuple[Turn, ...] = ()
    text: str = ""
    is_cut: bool = False  # the last answer is unfinished, so its end is not learned

    def __post_init__(self):
        if bool(self.turns) == bool(self.text):
            raise SpecjaxError("a conversation has either turns or a text; give one of them")
        for number, turn in enumerate(self.turns):
            allowed = (SYSTEM, USER, ASSISTANT) if number == 0 else (USER, ASSISTANT)
            if turn.role not in allowed:
                raise SpecjaxError(
                    f"turn {number} has role {turn.role!r}; use {', '.join(allowed)}"
                )

    @property
    def questions(self) -> tuple[str, ...]:
        """The user's turns: for self-distillation, where the target answers."""
        return tuple(turn.text for turn in self.turns if turn.role == USER)


def read_messages(rows: Any) -> list[Message]:
    """Reads a chat in OpenAI's form, whose contents may come in parts of type text."""
    has_roles = isinstance(rows, list) and all(
        isinstance(row, dict) and isinstance(row.get("role"), str) for row in rows
    )
    if not rows or not has_roles:
        raise SpecjaxError("messages must be a list of objects with role and content")
    chat: list[Any] = [
        {"role": row["role"], "content": content_text(row.get("content"))} for row in rows
    ]
    if any(message["content"] is None for message in chat):
        raise SpecjaxError("the content of a message must be text, or parts of type text")
    return chat


def messages_of(turns: Sequence[Turn]) -> list[Message]:
    """Returns the turns in OpenAI's form, which chat templates take."""
    return [{"role": turn.role, "content": turn.text} for turn in turns]


def read_conversations(
    sources: str | Path | Sequence[str | Path],
    needs_answers: bool = True,
    limit: int | None = None,
) -> Iterator[Conversation]:
    """Yields the conversations of all `sources`, one after another; warns about skipped lines.

    Args:
        sources: one or more files with a JSON object per line or with a JSON list, text files, or
            addresses and hub datasets as in `read_records`.
        needs_answers: skip conversations without assistant text; otherwise, for self-distillation,
            those without user text. Plain texts always stay.
        limit: conversations of each source at most; the rest of the source is not read.
    """
    sources = [sources] if isinstance(sources, (str, Path)) else sources

    def convert(value: Any) -> Conversation:
        conversation = conversation_of(value)
        role = ASSISTANT if needs_answers else USER
        has_text = any(turn.text.strip() for turn in conversation.turns if turn.role == role)
        if not (conversation.text or has_text):
            raise SpecjaxError(f"has no {role} turns")
        return conversation

    expected = 'conversation; write one JSON object per line, such as {"prompt": "...", ...}'
    return chain.from_iterable(
        [good_records(source, _records_of(source), convert, expected, limit) for source in sources]
    )


def _records_of(source: str | Path) -> Iterator[Record]:
    file = expand_user(source)
    is_text = file.suffix in TEXT_SUFFIXES and file.exists()
    return _parts_of(file) if is_text else read_records(source)


def _parts_of(file: Path) -> Iterator[Record]:
    """Yields a text file as plain texts, a few paragraphs each."""
    text = read_text(file)
    paragraphs = text.strip().replace("\r\n", "\n").split("\n\n")
    enough = min(PART_CHARACTERS, len(text) // MIN_PARTS)
    part: list[str] = []
    for number, paragraph in enumerate(paragraphs, start=1):
        part.append(paragraph)
        if number == len(paragraphs) or sum(map(len, part)) >= enough:
            yield Record(f"{file}, paragraph {number},", {"text": "\n\n".join(part)})
            part = []


# ---- Forms ---------------------------------------------------------------------------------------


def conversation_of(row: Any) -> Conversation:
    """Reads a record of any of the forms above; an error states the problem but not its place."""
    items = row.items() if isinstance(row, dict) else ()
    fields = {name: value for name, value in items if value is not None}
    for name in TURN_KEYS:
        if name in fields:
            return _of_turns(_turns(fields[name]), fields)
    if "instruction" in fields:
        parts = [_text(fields[name], name) for name in ("instruction", "input") if name in fields]
        return _of_pair("\n".join(filter(None, parts)), fields, ("output", "response"))
    if "prompt" in fields:
        return _of_pair(_text(fields["prompt"], "prompt"), fields, ("response", "completion"))
    if "text" in fields:
        text = _text(fields["text"], "text")
        if not text.strip():
            raise SpecjaxError("is empty")
        return Conversation(text=text)
    raise SpecjaxError("has no conversations, messages, instruction, prompt or text")


def _of_pair(question: str, fields: dict[str, Any], answer_names: Sequence[str]) -> Conversation:
    answers = [_text(fields[name], name) for name in answer_names if name in fields]
    turns = [Turn(USER, question), *(Turn(ASSISTANT, text) for text in answers[:1])]
    return _of_turns(turns, fields)


def _turns(rows: Any) -> list[Turn]:
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise SpecjaxError("has turns that are not a list of objects")
    turns = []
    for row in rows:
        row = {name: value for name, value in row.items() if value is not None}
        role = row.get("from", row.get("role"))
        if not isinstance(role, str) or role.lower() not in ROLES:
            raise SpecjaxError(f"has a turn of the unknown role {role!r}")
        text = _text(row.get("value", row.get("content")), f"a turn of {role!r}")
        turns.append(Turn(ROLES[role.lower()], text))
    return turns


def _text(value: Any, place: str) -> str:
    if (text := content_text(value)) is None:
        raise SpecjaxError(f"has no text in {place}")
    return text


def _of_turns(turns: Sequence[Turn], fields: dict[str, Any]) -> Conversation:
    """Drops answers before the first question, which a cut conversation may begin with."""
    system = [turn for turn in turns[:1] if turn.role == SYSTEM]
    rest = list(turns[len(system) :])
    while rest and rest[0].role == ASSISTANT:
        rest.pop(0)
    if any(turn.role == SYSTEM for turn in rest):
        raise SpecjaxError("has a system turn that is not the first")
    if not rest:
        raise SpecjaxError("has no user turns")
    return Conversation((*system, *rest), is_cut=fields.get("is_cut") is True)
