"""Which prompts are measured: tasks made from pocket's held-out code, or those of a file."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax.bench.task_files import read_questions
from specjax.core.errors import SpecjaxError
from specjax.decoding.prompt import chat_ids

POCKET = "pocket"
COMPLETE = "complete"  # the kind of task that is no edit


@dataclass(frozen=True)
class Task:
    """One prompt, or the user's side of a chat, and the kind of task that it is counted under."""

    kind: str
    turns: tuple[str, ...]  # one text, or what the user says, turn by turn
    is_chat: bool = False  # a user's messages, which the target gets in chat form
    is_opening: bool = False  # of a text: BOS stands before it, even if the tokenizer adds none

    @property
    def text(self) -> str:
        """The first turn."""
        return self.turns[0]


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
        source: "pocket", or a file with questions in any of the forms of `task_files.FORMS`. The
            kind is their `category`, or else the name of the file.
        limit: tasks per kind.
        seed: decides which tasks pocket makes.
        is_validation: pocket makes them of other code than otherwise.
        complain: told of every record that holds no task; such records are left out.

    Raises:
        SpecjaxError: for a file that cannot be read or holds no task.
    """
    if limit < 1:
        raise SpecjaxError(f"limit {limit} must be at least 1: nothing would be measured")
    if source == POCKET:
        return tuple(_pocket_tasks(limit, seed, is_validation))
    path = Path(source)
    questions = read_questions(path, complain)
    tasks = [Task(each.category or path.stem, each.turns, each.is_chat) for each in questions]
    return tuple(_first_of_each_kind(tasks, limit))


def token_ids(task: Task, tokenizer: Any) -> tuple[int, ...]:
    """The first prompt in the target's tokens: a message in chat form, other text as it stands.

    Raises:
        SpecjaxError: if the chat template refuses a user's message.
    """
    if task.is_chat:
        return chat_ids(tokenizer, task.text)
    ids = tuple(tokenizer(task.text)["input_ids"])
    has_bos = tokenizer.bos_token_id in (None, *ids[:1])
    return (tokenizer.bos_token_id, *ids) if task.is_opening and not has_bos else ids


def later_turn_ids(task: Task, answers: Sequence[str], tokenizer: Any) -> tuple[int, ...]:
    """The prompt of turn number `len(answers)`, from 0: the chat so far and what the user says now.

    Args:
        task: a chat.
        answers: what the assistant said to each of the earlier turns.
        tokenizer: the target's.

    Raises:
        SpecjaxError: if the task has no such turn, or the chat template refuses such a chat.
    """
    if not task.is_chat or len(answers) >= len(task.turns):
        form = "chat" if task.is_chat else "text"
        raise SpecjaxError(
            f"a {form} of {len(task.turns)} turn(s) has none after {len(answers)} answer(s); give "
            "a chat with more turns than answers"
        )
    messages = []
    for message, answer in zip(task.turns, answers, strict=False):  # the last is not answered
        messages.append({"role": "user", "content": message})
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": task.turns[len(answers)]})
    return chat_ids(tokenizer, messages)


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
                yield Task(kind, (f"{task.instruction}\n{task.source}",), is_chat=True)
    for text in corpus.held_out_openings(limit, seed, is_validation):
        yield Task(COMPLETE, (text,), is_opening=True)
