"""Reads conversations to learn from, out of JSONL files, JSON lists, text files and hub datasets.

Every line may have one of these forms:

    {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}   ShareGPT
    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", ...}]}          OpenAI
    {"instruction": ..., "input": ..., "output": ...}                                     Alpaca
    {"prompt": ..., "response": ...}    or "completion"
    {"text": ...}                       plain text

A `.txt` or `.md` file is plain text, cut at blank lines. `"is_cut": true` beside one of these forms
says that the last answer is unfinished.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from specjax.core.errors import SpecjaxError, warn
from specjax.core.files import MAX_TEXT_BYTES, bounded_lines, expand_user, read_bytes
from specjax.data.documents import NUM_SHOWN, checked_hub_id, hub_rows, reading, whole_characters

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
ROLES = {  # as files have them
    **dict.fromkeys((SYSTEM, "developer"), SYSTEM),
    **dict.fromkeys((USER, "human"), USER),
    **dict.fromkeys((ASSISTANT, "gpt", "chatgpt", "bot", "model"), ASSISTANT),
}
TURN_KEYS = ("conversations", "conversation", "messages")
TEXT_SUFFIXES = (".txt", ".md")
PART_CHARACTERS = 4000  # of a text file, at least: it is cut at blank lines
MIN_PARTS = 20  # a shorter file is cut into about as many


class Turn(NamedTuple):
    """One message; `role` is system, user or assistant."""

    role: str
    text: str


@dataclass(frozen=True)
class Conversation:
    """Turns, of which the assistant's are learned; or a plain text, which is learned whole.

    Raises:
        SpecjaxError: for both or neither, an unknown role, or a system turn that is not the first.
    """

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
    def size(self) -> int:
        """The number of characters."""
        return len(self.text) + sum(len(turn.text) for turn in self.turns)

    @property
    def questions(self) -> tuple[str, ...]:
        """The user's turns: for self-distillation, where the target answers."""
        return tuple(turn.text for turn in self.turns if turn.role == USER)


def messages_of(turns: Sequence[Turn]) -> list[dict[str, str]]:
    """Returns the turns in OpenAI's form, which chat templates take."""
    return [{"role": turn.role, "content": turn.text} for turn in turns]


def read_conversations(
    sources: Sequence[str | Path], needs_answers: bool = True, limit: int | None = None
) -> Iterator[Conversation]:
    """Yields the conversations of all `sources`, one after another; warns about skipped lines.

    Args:
        sources: files with a JSON object per line or with a JSON list of objects, text files, or
            hub ids of datasets (their "train" split; needs the package `datasets`).
        needs_answers: skip conversations without assistant text; otherwise, for self-distillation,
            those without user text. Plain texts always stay.
        limit: conversations of each source at most; the rest of the source is not read.

    Raises:
        SpecjaxError: at once for a source that does not exist; when it is read for one that cannot
            be read, or has no conversation left.
    """
    needed = ASSISTANT if needs_answers else USER
    parts = [_valid(str(source), _rows_of(source), needed, limit) for source in sources]
    return chain.from_iterable(parts)


class _Broken(Exception):
    """A line to skip: the kind of reason, by which such lines are counted, and the details."""

    def __init__(self, kind: str, details: str):
        super().__init__(details)
        self.kind = kind


def _valid(
    source: str, rows: Iterator[tuple[str, Any]], needed: str, limit: int | None
) -> Iterator[Conversation]:
    """Yields the conversations of one source, without the broken ones."""
    num_rows, broken = 0, Counter()
    for place, row in rows:
        num_rows += 1
        try:
            conversation = _conversation(row)
            texts = [turn.text.strip() for turn in conversation.turns if turn.role == needed]
            if not (conversation.text or any(texts)):
                raise _without(needed)
        except _Broken as problem:
            broken[problem.kind] += 1
            if broken.total() <= NUM_SHOWN:
                warn(f"{place} {problem}; skipping this line")
        else:
            yield conversation
            if num_rows - broken.total() == limit:
                break
    kinds = ", ".join(f"{count} {kind}" for kind, count in broken.most_common())
    if broken.total() == num_rows:
        raise SpecjaxError(
            f"{source} holds no conversation to learn from ({kinds or 'it is empty'}); write one "
            'JSON object per line, such as {"prompt": "...", "response": "..."}'
        )
    if broken:
        warn(f"Skipped {broken.total()} of {num_rows} lines of {source}: {kinds}.")


# ---- Rows: a place, and the JSON value there, or bytes that are yet to be parsed -----------------


def _rows_of(source: str | Path) -> Iterator[tuple[str, Any]]:
    path = expand_user(source)
    if str(source) and path.exists():
        return _rows_in(path)
    name = checked_hub_id(source)
    return ((f"{name}, row {number},", row) for number, row in enumerate(hub_rows(name), start=1))


def _rows_in(file: Path) -> Iterator[tuple[str, Any]]:
    if file.suffix in TEXT_SUFFIXES:
        yield from _parts_of(file)
        return
    with reading(file), file.open("rb") as opened:
        is_list = opened.peek().lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["
        if file.suffix == ".jsonl" or not is_list:
            lines = enumerate(bounded_lines(opened, file), start=1)
            yield from ((f"{file}:{number}", line) for number, line in lines if line.strip())
            return
        try:
            rows = json.loads(read_bytes(file, MAX_TEXT_BYTES))
        except (ValueError, RecursionError) as error:
            raise SpecjaxError(
                f"{file} is not valid JSON ({error}); fix it, or write one object per line"
            ) from None
    yield from ((f"{file}, item {number},", row) for number, row in enumerate(rows, start=1))


def _parts_of(file: Path) -> Iterator[tuple[str, Any]]:
    """Yields a text file as plain texts, a few paragraphs each."""
    with reading(file):
        text = read_bytes(file, MAX_TEXT_BYTES).decode("utf-8-sig")
    paragraphs = text.strip().replace("\r\n", "\n").split("\n\n")
    enough = min(PART_CHARACTERS, len(text) // MIN_PARTS)
    part: list[str] = []
    for number, paragraph in enumerate(paragraphs, start=1):
        part.append(paragraph)
        if number == len(paragraphs) or sum(map(len, part)) >= enough:
            yield f"{file}, paragraph {number},", {"text": "\n\n".join(part)}
            part = []


# ---- Forms ---------------------------------------------------------------------------------------


def _conversation(row: Any) -> Conversation:
    if isinstance(row, bytes):
        try:
            row = json.loads(row)
        except (ValueError, RecursionError) as error:
            raise _Broken("not JSON", f"is not JSON ({error})") from None
    items = row.items() if isinstance(row, dict) else ()
    fields = {name: value for name, value in items if value is not None}
    for name in TURN_KEYS:
        if name in fields:
            return replace(_of_turns(_turns(fields[name])), is_cut=fields.get("is_cut") is True)
    if "instruction" in fields:
        parts = [_text(fields[name], name) for name in ("instruction", "input") if name in fields]
        return _of_pair("\n".join(filter(None, parts)), fields, ("output", "response"))
    if "prompt" in fields:
        return _of_pair(_text(fields["prompt"], "prompt"), fields, ("response", "completion"))
    if "text" in fields:
        text = _text(fields["text"], "text")
        if not text.strip():
            raise _Broken("empty", "is empty")
        return Conversation(text=text)
    raise _Broken("of no known form", "has no conversations, messages, instruction, prompt or text")


def _of_pair(asked: str, fields: dict[str, Any], answer_names: Sequence[str]) -> Conversation:
    answers = [_text(fields[name], name) for name in answer_names if name in fields]
    return _of_turns([Turn(USER, asked), *(Turn(ASSISTANT, text) for text in answers[:1])])


def _turns(rows: Any) -> list[Turn]:
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise _Broken("of wrong types", "has turns that are not a list of objects")
    turns = []
    for row in rows:
        role = row.get("from", row.get("role"))
        if not isinstance(role, str) or role.lower() not in ROLES:
            raise _Broken("with unknown roles", f"has a turn of the unknown role {role!r}")
        text = _text(row.get("value", row.get("content")), f"a turn of {role!r}")
        turns.append(Turn(ROLES[role.lower()], text))
    return turns


def _text(value: Any, place: str) -> str:
    """Returns a string; of OpenAI's list of parts, if all of them are text, their whole."""
    if isinstance(value, list):
        is_text = [isinstance(part, dict) and part.get("type") == "text" for part in value]
        value = "".join(_text(part.get("text"), place) for part in value) if all(is_text) else value
    if not isinstance(value, str):
        raise _Broken("of wrong types", f"has {type(value).__name__} instead of text in {place}")
    return whole_characters(value)


def _of_turns(turns: Sequence[Turn]) -> Conversation:
    """Drops answers before the first question, which a cut conversation may begin with."""
    system = [turn for turn in turns[:1] if turn.role == SYSTEM]
    rest = list(turns[len(system) :])
    while rest and rest[0].role == ASSISTANT:
        rest.pop(0)
    if any(turn.role == SYSTEM for turn in rest):
        raise _Broken("with unknown roles", "has a system turn that is not the first")
    if not rest:
        raise _without(USER)
    return Conversation((*system, *rest))


def _without(role: str) -> _Broken:
    kind = f"without {role} turns"
    return _Broken(kind, f"is {kind}")
