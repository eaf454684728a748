"""Which prompts are measured: tasks made from pocket's held-out code, or a JSONL file."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax.decoding.prompt import chat_ids
from specjax.errors import SpecjaxError
from specjax.files import expand_user

POCKET = "pocket"
COMPLETE = "complete"  # the kind of task that is no edit


@dataclass(frozen=True)
class Task:
    """One prompt and the kind of task that it is counted under."""

    kind: str
    text: str
    is_chat: bool = False  # a user's message, which the target gets in chat form
    is_opening: bool = False  # of a text: BOS stands before it, even if the tokenizer adds none


def _to_stderr(complaint: str) -> None:
    print("specjax:", complaint, file=sys.stderr)


def read_tasks(
    source: str,
    limit: int,
    seed: int = 0,
    is_validation: bool = False,
    complain: Callable[[str], None] = _to_stderr,
) -> tuple[Task, ...]:
    """The first `limit` tasks of each kind, ordered by kind.

    Args:
        source: "pocket", or a file with a JSON object per line: `prompt` is continued as it
            stands; else the first of `turns` is a user's message. The kind is `category`, or else
            the name of the file. Other fields are ignored, so Spec-Bench's questions do.
        limit: tasks per kind.
        seed: decides which tasks pocket makes.
        is_validation: pocket makes them of other code than otherwise.
        complain: told of every line that holds no task; such lines are left out.

    Raises:
        SpecjaxError: for a file that cannot be read or holds no task.
    """
    if limit < 1:
        raise SpecjaxError(f"limit {limit} must be at least 1: nothing would be measured")
    if source == POCKET:
        return tuple(_pocket_tasks(limit, seed, is_validation))
    tasks = _file_tasks(Path(source), complain)
    return tuple(_first_of_each_kind(tasks, limit))


def token_ids(task: Task, tokenizer: Any) -> tuple[int, ...]:
    """The prompt in the target's tokens: a message in chat form, other text as it stands."""
    if task.is_chat:
        return chat_ids(tokenizer, task.text)
    ids = tuple(tokenizer(task.text)["input_ids"])
    has_bos = tokenizer.bos_token_id in (None, *ids[:1])
    return (tokenizer.bos_token_id, *ids) if task.is_opening and not has_bos else ids


def _first_of_each_kind(tasks: Iterable[Task], limit: int) -> Iterator[Task]:
    taken = Counter()
    kept = []
    for task in tasks:
        taken[task.kind] += 1
        if taken[task.kind] <= limit:
            kept.append(task)
    kinds = list(taken)
    yield from sorted(kept, key=lambda task: kinds.index(task.kind))


def _pocket_tasks(limit: int, seed: int, is_validation: bool) -> Iterator[Task]:
    """Edit tasks, which targets get as a user's message, and code to be continued freely."""
    from specjax.pocket import corpus, edits

    made = edits.held_out_tasks(limit * len(edits.KINDS), seed, is_validation=is_validation)
    for kind in edits.KINDS:
        for task in made:
            if task.kind == kind:
                yield Task(kind, f"{task.instruction}\n{task.source}", is_chat=True)
    for text in corpus.held_out_openings(limit, seed, is_validation):
        yield Task(COMPLETE, text, is_opening=True)


def _file_tasks(path: Path, complain: Callable[[str], None]) -> Sequence[Task]:
    try:
        lines = expand_user(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise SpecjaxError(
            f"tasks {path} cannot be read ({reason}); give 'pocket' or a JSONL file"
        ) from None
    tasks = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                tasks.append(_task(line, f"{path}:{number}", path.stem))
            except SpecjaxError as error:
                complain(f"{error}; this line is left out")
    if not tasks:
        raise SpecjaxError(f"{path} holds no tasks; write one JSON object per line")
    return tasks


def _task(line: str, place: str, default_kind: str) -> Task:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise SpecjaxError(f"{place} is not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise SpecjaxError(f'{place} is no JSON object such as {{"prompt": "..."}}')
    is_chat = "prompt" not in fields
    turns = fields.get("turns")
    first_turn = turns[0] if isinstance(turns, list) and turns else None
    text = first_turn if is_chat else fields["prompt"]
    if not isinstance(text, str) or not text:
        raise SpecjaxError(f"{place} has no text: it needs a `prompt`, or `turns` with a first one")
    kind = fields.get("category", default_kind)
    if not isinstance(kind, str) or not kind:
        raise SpecjaxError(f"{place}: its category {kind!r} is no name")
    return Task(kind, text, is_chat)
