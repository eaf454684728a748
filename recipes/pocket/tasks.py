"""Writes pocket's tasks and conversations: `python -m recipes.pocket.tasks --out DIR`.

They come from the standard library of the running Python; those in `specjax/data/pocket` are of
Python 3.11.7. It takes a minute.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import main
from recipes.pocket import corpus
from recipes.pocket.edits import KINDS

NUM_TASKS = 100  # of each kind


@dataclass(frozen=True)
class Options:
    """Write pocket's tasks and conversations."""

    out: Path
    """A folder, made if it is missing."""
    num_conversations: int = 8000
    """Conversations that heads learn from; `specjax train` reads the default number."""


def task_records(is_validation: bool) -> Iterable[dict[str, Any]]:
    """Yields edit tasks kind by kind, each with its answer, then openings of modules."""
    tasks = corpus.held_out_tasks(NUM_TASKS * len(KINDS), validation=is_validation)
    for kind in KINDS:
        for task in tasks:
            if task.kind == kind:
                yield {"category": kind, "turns": [task.message], "answer": task.result}
    for opening in corpus.held_out_openings(NUM_TASKS, validation=is_validation):
        yield {"category": "complete", "prompt": opening}


def write(options: Options) -> None:
    """Writes the files."""
    files = {
        "test.jsonl": task_records(is_validation=False),
        "validation.jsonl": task_records(is_validation=True),
        "conversations.jsonl": corpus.conversation_records(options.num_conversations),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    for name, records in files.items():
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        (options.out / name).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(write, Options, __doc__)
