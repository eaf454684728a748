"""The questions of SmolLM2's results: four of each of nine kinds."""

import random
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from recipes.smollm2.prompts import problems_in, rows_of, statement_of
from specjax import SpecjaxError
from specjax.core.files import read_text

PER_KIND = 4
NUM_EDITED_WORDS = 60
MBPP_TEST = range(11, 511)  # task ids
MT_BENCH = "writing roleplay reasoning math coding extraction stem humanities".split()


def questions_in(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the questions, each with its kind as `category`."""
    spec_bench = rows_of(folder / "spec_bench.jsonl", "category", "turns")
    of_kind = {kind: [row for row in spec_bench if row["category"] == kind] for kind in MT_BENCH}
    mixed = [row for rows in zip(*of_kind.values(), strict=False) for row in rows]
    yield from _questions("MT-bench", [row["turns"][0] for row in mixed[::3]])
    for kind in ("translation", "summarization", "qa", "math_reasoning", "rag"):
        texts = [row["turns"][0] for row in spec_bench if row["category"] == kind]
        yield from _questions(kind, texts)
    problems = problems_in(folder, MBPP_TEST)
    yield from _questions("MBPP", map(statement_of, problems))
    yield from _questions("code edit", filter(None, (renaming(row["code"]) for row in problems)))
    texts = filter(str.strip, read_text(folder / "wiki_demo.txt").split("\n"))
    yield from _questions("text edit", map(correction, texts))


def renaming(code: str) -> str | None:
    """Returns the task to rename the one function of a program; None if it has more."""
    names = re.findall(r"^def (\w+)", code, re.MULTILINE)
    if len(names) != 1:
        return None
    program = code.replace("\r\n", "\n").strip()
    return (
        f"Rename the function `{names[0]}` to `solve` in this program, and return the whole "
        f"program.\n\n```python\n{program}\n```"
    )


def correction(text: str) -> str:
    """Returns the task to correct the beginning of a text, of which every tenth word is garbled."""
    words = text.split()[:NUM_EDITED_WORDS]
    shuffler = random.Random(0)
    for place in range(4, len(words), 10):
        letters = list(words[place])
        shuffler.shuffle(letters)
        words[place] = "".join(letters)
    text = " ".join(words)
    return f"Correct the spelling of this text, and return the whole text.\n\n{text}"


def _questions(kind: str, texts: Iterable[str]) -> Iterator[dict[str, Any]]:
    questions = [{"category": kind, "turns": [text]} for text in islice(texts, PER_KIND)]
    if len(questions) < PER_KIND:
        raise SpecjaxError(
            f"the data hold {len(questions)} questions of {kind} and {PER_KIND} are needed; see "
            "the recipe's help"
        )
    yield from questions
