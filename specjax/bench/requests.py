"""The prompts of a benchmark in tokens, later turns of conversations included."""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import numpy as np

from specjax.bench.measure import Request
from specjax.bench.tasks import Task, later_turn_ids, token_ids
from specjax.core.errors import SpecjaxError
from specjax.decoding.prompt import from_ids
from specjax.decoding.request import check_length, check_prompt
from specjax.hub import LoadedTarget
from specjax.models.config import TransformerConfig

Answers = Callable[[Sequence[tuple[int, ...]]], Iterable[Sequence[int]]]


def requests_of(
    tasks: Sequence[Task], target: LoadedTarget, max_new_tokens: int, answer: Answers
) -> list[Request]:
    """One prompt per turn, kind by kind.

    Args:
        tasks: tasks of one kind stand together.
        target: whose tokens they are.
        max_new_tokens: that it is to add to each.
        answer: what plain greedy decoding says to each prompt. Later turns stand behind that, so
            that all methods get the same prompts.

    Raises:
        SpecjaxError: for a target without a tokenizer, or a prompt that it cannot continue.
    """
    tokenizer = target.require_tokenizer()
    of_task: list[list[Request]] = [
        [Request(task.kind, token_ids(task, tokenizer))] for task in tasks
    ]
    said: list[list[str]] = [[] for _ in tasks]
    _check(of_task, target.config, max_new_tokens)
    for turn in range(1, max(len(task.turns) for task in tasks)):
        going_on = [number for number, task in enumerate(tasks) if len(task.turns) > turn]
        answers = answer([of_task[number][-1].ids for number in going_on])
        for number, tokens in zip(going_on, answers, strict=True):
            task = tasks[number]
            said[number].append(tokenizer.decode(tokens, skip_special_tokens=True))
            ids = later_turn_ids(task, said[number], tokenizer)
            of_task[number].append(Request(task.kind, ids))
        _check(of_task, target.config, max_new_tokens)
    return [request for requests in of_task for request in requests]


def _check(
    of_task: Sequence[Sequence[Request]], config: TransformerConfig, max_new_tokens: int
) -> None:
    newest = [requests[-1] for requests in of_task]
    for kind, group in groupby(newest, key=lambda request: request.kind):
        check_prompts(kind, [request.ids for request in group], config, max_new_tokens)


def check_prompts(
    kind: str, rows: Sequence[Sequence[int]], config: TransformerConfig, max_new_tokens: int
) -> None:
    """Raises SpecjaxError, with kind and number (from 0), for a prompt that cannot be served."""
    try:
        prompt = from_ids(rows)
        check_prompt(np.asarray(prompt.tokens), np.asarray(prompt.length), config)
    except SpecjaxError as error:
        raise SpecjaxError(f"{kind} {error}") from None
    for number, ids in enumerate(rows):
        try:
            check_length(len(ids), max_new_tokens, config)
        except SpecjaxError as error:
            raise SpecjaxError(f"{kind} prompt {number}: {error}, or leave it out") from None
