"""Draws the questions of a recipe and keeps them in one file that `specjax bench` reads."""

import json
import zlib
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from random import Random
from statistics import fmean

from specjax import SpecjaxError
from specjax.core.files import expand_user, write_whole
from specjax.data.task_files import FORMS, Question, read_questions

from .editing import EDITING_FORMS
from .recipe import DataSet

TRIAL_RECORDS = 1000  # of a source that are read with --limit; samples and skipped ones fit


def is_there(data: DataSet, folder: Path | None) -> bool:
    """Whether a data set can be read: from files in a folder, or else from hub or web."""
    if folder is None:
        return bool(data.sources)
    return all((expand_user(folder) / name).is_file() for name in data.files)


def sources_of(data: DataSet, folder: Path | None) -> list[str]:
    """Returns the local files of a data set, all of which must be there, or else its sources."""
    if not is_there(data, folder):
        place = "on the hub" if folder is None else f"in {folder}"
        raise SpecjaxError(
            f"{data.title} is not {place}; get it from {data.page}, write it as "
            f"{', '.join(data.files)} in a folder, and name that with --data"
        )
    if folder is None:
        return list(data.sources)
    return [str(expand_user(folder) / name) for name in data.files]


def draw(data: DataSet, folder: Path | None, limit: int | None, seed: int) -> list[Question]:
    """Returns the questions of a data set, at most `limit`."""
    groups: dict[str, list[Question]] = {}
    first = data.first
    # The same for any limit, so that `skip` keeps samples apart. Fewer records may lack a kind.
    if limit is not None and data.sample is not None and not (data.per_kind or data.kinds):
        first = min(first or TRIAL_RECORDS, TRIAL_RECORDS)
    for source in sources_of(data, folder):
        for question in read_questions(source, first, forms=(*EDITING_FORMS, *FORMS)):
            if not data.kinds or question.category in data.kinds:
                name = str(question.category) if data.per_kind else source
                groups.setdefault(name, []).append(question)
    if data.sample is not None:
        for name, group in groups.items():
            shuffled = Random(f"{seed}, {name}").sample(group, len(group))
            groups[name] = shuffled[data.skip :][: data.sample] or shuffled[: data.sample]
    drawn = list(chain.from_iterable(groups.values()))
    if not drawn:
        raise SpecjaxError(f"{data.title} holds no question of {', '.join(data.kinds)}")
    if limit is not None and limit < len(drawn):  # spread over the groups
        drawn = [drawn[number * len(drawn) // limit] for number in range(limit)]
    return [question._replace(is_chat=question.is_chat or data.is_chat) for question in drawn]


def write_tasks(questions: Mapping[str, Sequence[Question]], folder: Path) -> Path:
    """Writes questions by title, which becomes their category, and returns the file.

    Its name has a checksum of what it holds, so the same questions are the same file.
    """
    lines = []
    for title, group in questions.items():
        for question in group:
            turns = question.turns
            prompt = {"turns": turns} if question.is_chat else {"prompt": turns[0]}
            lines.append(json.dumps({"category": title, **prompt}, ensure_ascii=False))
    text = "\n".join(lines) + "\n"
    path = folder / f"tasks-{zlib.crc32(text.encode()):08x}.jsonl"
    write_whole(path, text.encode())
    return path


def num_words(questions: Sequence[Question]) -> float:
    """Returns the mean number of words of a turn."""
    return fmean(len(turn.split()) for question in questions for turn in question.turns)
