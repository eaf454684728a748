"""Writes the texts that the heads learn: questions, and the answers of SmolLM2 itself.

    python -m recipes.smollm2.texts --target TARGET --out FOLDER [--data FOLDER_OF_PROMPTS]

Most questions are the target's own. A folder of prompts holds `alpaca_en_demo.json`,
`conversations.json`, `gsm8k_train.jsonl` and `mbpp.jsonl`; only their questions are read, and of
MBPP only the training part. Interrupted, the same command goes on. The texts are in
FOLDER/texts.jsonl, which `specjax train --data` reads.
"""

import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from benchmarks.harness import main
from recipes.smollm2.prompts import problems_in, rows_of, statement_of
from specjax import load
from specjax.bench.measure import with_progress
from specjax.cli.environment import use_compilation_cache
from specjax.data.conversations import USER, Conversation, Turn, read_conversations
from specjax.run.distillation import DistillOptions, distill, generate_questions

LONGEST = 1024  # tokens of a text
OPTIONS = DistillOptions(distill_temperature=0.7, distill_tokens=320, distill_batch=64)
MBPP_TRAINING = range(601, 975)  # task ids
NUM_MATHS = 1500  # of GSM8K's 7473 problems


@dataclass(frozen=True)
class Texts:
    """Options of the command."""

    target: str
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    data: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    own: int = 700
    """Questions that the target writes."""

    def run(self) -> None:
        """Writes questions, then answers."""
        use_compilation_cache()
        target = load(self.target)
        asked = questions_in(self.data) if self.data else []
        if self.own:
            asked += generate_questions(
                target,
                self.own,
                self.out / "questions.jsonl",
                OPTIONS,
                watch=partial(with_progress, doing="The target writes questions"),
                resume=True,
            )
        random.Random(0).shuffle(asked)
        distill(
            target,
            asked,
            self.out / "texts.jsonl",
            LONGEST,
            OPTIONS,
            watch=partial(with_progress, doing="The target answers"),
            resume=True,
        )


def questions_in(folder: Path) -> list[Conversation]:
    """Reads the questions of a folder of prompts."""
    chats = [folder / "alpaca_en_demo.json", folder / "conversations.json"]
    asked = list(read_conversations(chats, needs_answers=False))
    maths = rows_of(folder / "gsm8k_train.jsonl", "question")[:NUM_MATHS]
    asked += [_question(row["question"]) for row in maths]
    code = problems_in(folder, MBPP_TRAINING)
    return asked + [_question(statement_of(problem)) for problem in code]


def _question(text: str) -> Conversation:
    return Conversation((Turn(USER, text),))


if __name__ == "__main__":
    main(Texts.run, Texts, __doc__)
