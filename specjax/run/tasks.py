"""Tasks from pocket's held-out code or from a file, and their prompts in tokens."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.core.chat import FIXED_DAY, Message, chat_ids, opening_ids
from specjax.core.errors import SpecjaxError, check_whole, errors_at, warn
from specjax.core.text import decode
from specjax.data.task_files import TASKS, read_questions
from specjax.decoding.prompt import from_ids
from specjax.decoding.request import check_prompt
from specjax.loading.targets import LoadedTarget
from specjax.models.config import TransformerConfig

POCKET = "pocket"
COMPLETE = "complete"  # pocket's kind of task that is not an edit
# Returns plain greedy decoding's answers to prompts of token ids.
Answer = Callable[[Sequence[tuple[int, ...]]], Iterable[Sequence[int]]]


class TaskPrompt(NamedTuple):
    """One prompt, in tokens."""

    kind: str
    ids: tuple[int, ...]
    turn: int = 0  # of a chat, whose turns follow each other


@dataclass(frozen=True)
class Task:
    """One prompt, or the user's side of a chat, and the kind of task that it counts under."""

    kind: str
    turns: tuple[str, ...]  # one text, or the user's messages in order
    is_chat: bool = False  # the target gets the messages in chat form
    is_opening: bool = False  # the text gets a BOS even if the tokenizer adds none
    system: str | None = None  # the message before those of a chat

    @property
    def text(self) -> str:
        return self.turns[0]

    def messages(self, answers: Sequence[str] = ()) -> list[Message]:
        """Returns the chat until the message of the user that follows these answers."""
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for message, answer in zip(self.turns, answers, strict=False):  # the last is not answered
            messages.append({"role": "user", "content": message})
            messages.append({"role": "assistant", "content": answer})
        return [*messages, {"role": "user", "content": self.turns[len(answers)]}]


def read_tasks(
    source: str, limit: int, seed: int = 0, is_validation: bool = False
) -> tuple[Task, ...]:
    """Returns the first `limit` tasks of each kind, kind by kind; warns about bad records.

    `source` is "pocket", or what `task_files.read_questions` reads. The kind is the `category` or
    `data_source` of a question, or else the name of the file. `seed` selects among pocket's tasks,
    and `is_validation` takes those for tuning; other sources have one set.
    """
    check_whole("limit", limit, 1)
    if source == POCKET:
        return tuple(_pocket_tasks(limit, seed, is_validation))
    kept: dict[str, list[Task]] = {}
    for category, turns, is_chat in read_questions(source, limit=limit):
        kind = category or Path(source).stem
        tasks = kept.setdefault(kind, [])
        if len(tasks) < limit:
            tasks.append(Task(kind, turns, is_chat))
    return tuple(chain.from_iterable(kept.values()))


def token_ids(task: Task, tokenizer: Any, answers: Sequence[str] = ()) -> tuple[int, ...]:
    """Returns a prompt in tokens: a chat so far with the user's next message, or a text as it is.

    `answers` are the assistant's to the earlier turns of a chat.
    """
    if task.is_chat:
        return chat_ids(tokenizer, task.messages(answers), today=FIXED_DAY)
    if task.is_opening:
        return opening_ids(tokenizer, task.text)
    return tuple(tokenizer(task.text)["input_ids"])


def task_prompts(
    tasks: Sequence[Task], target: LoadedTarget, max_new_tokens: int, answer: Answer
) -> list[TaskPrompt]:
    """Returns one prompt per turn, kind by kind; warns about those that do not fit.

    A prompt that leaves the target no position to continue it is left out, and so are the turns
    after it. One that leaves some, but fewer than `max_new_tokens`, is continued that far.

    Tasks of one kind must be adjacent. Later turns follow the answers of plain greedy decoding, so
    that all methods get the same prompts.
    """
    tokenizer, config = target.require_tokenizer(), target.config
    of_task: list[list[TaskPrompt]] = [[] for _ in tasks]
    answered: list[list[str]] = [[] for _ in tasks]
    active, problem = list(range(len(tasks))), ""
    for turn in range(max(len(task.turns) for task in tasks)):
        active = [number for number in active if len(tasks[number].turns) > turn]
        if turn:
            answers = answer([of_task[number][-1].ids for number in active])
            for number, tokens in zip(active, answers, strict=True):
                answered[number].append(decode(tokenizer, tokens))
        for kind, numbers in groupby(active, lambda number: tasks[number].kind):
            prompts = {n: token_ids(tasks[n], tokenizer, answered[n]) for n in numbers}
            check_prompts(kind, list(prompts.values()), config)
            first = [task.kind for task in tasks].index(kind)
            for number, ids in prompts.items():
                if len(ids) < config.longest_from(len(ids)):
                    of_task[number].append(TaskPrompt(kind, ids, turn))
                    continue
                active = [other for other in active if other != number]
                problem = (
                    f"turn {turn + 1} of {kind} prompt {number - first} has {len(ids)} tokens, and "
                    f"the target {config.longest_text} positions"
                )
                warn(f"{problem}; it is left out")
    all_requests = [request for requests in of_task for request in requests]
    if not all_requests:
        raise SpecjaxError(f"no prompt leaves room for an answer: {problem}; give other tasks")
    if num_cut := count_cut(all_requests, config, max_new_tokens):
        warn(
            f"{num_cut} of {len(all_requests)} answers end at the target's {config.longest_text} "
            f"positions, before {max_new_tokens} new tokens"
        )
    return all_requests


def count_cut(prompts: Iterable[TaskPrompt], config: TransformerConfig, max_new_tokens: int) -> int:
    """Counts the prompts that leave the target fewer positions than `max_new_tokens`."""
    lengths = [len(prompt.ids) for prompt in prompts]
    return sum(length + max_new_tokens > config.longest_from(length) for length in lengths)


def check_prompts(kind: str, rows: Sequence[Sequence[int]], config: TransformerConfig) -> None:
    """Raises SpecjaxError, with kind and number (from 0), for an invalid prompt."""
    with errors_at(kind):
        prompt = from_ids(rows)
        check_prompt(np.asarray(prompt.tokens), np.asarray(prompt.length), config)


def _pocket_tasks(limit: int, seed: int, is_validation: bool) -> Iterator[Task]:
    """Yields edit tasks, as a user's message, and openings of code to be continued freely."""
    file = TASKS / ("validation.jsonl" if is_validation else "test.jsonl")
    for kind, group in groupby(read_questions(file), lambda question: question.category):
        questions = list(group)
        if seed:
            random.Random(seed).shuffle(questions)
        for question in questions[:limit]:
            yield Task(str(kind), question.turns, question.is_chat, is_opening=kind == COMPLETE)
