"""Small training runs on few texts, for the tests of `specjax train`."""

import json
import random
from pathlib import Path

MEASURED = ("--eval-prompts", "2", "--eval-tokens", "8")
SHORT = (  # steps on texts of one bucket
    *("--batch-size", "2", "--longest", "64", "--log-every", "1", *MEASURED),
    *("--num-steps", "6", "--eval-every", "3", "--save-every", "2"),
)
WORDS = "total value best for in return count max if while".split()


def write_chats(file: Path) -> Path:
    """24 conversations of random words, with one or two answers; every fifth is a plain text."""
    rng = random.Random(0)
    rows = []
    for number in range(24):
        texts = [" ".join(rng.choices(WORDS, k=count)) for count in (3, 8)]
        turns = [{"from": "human", "value": texts[0]}, {"from": "gpt", "value": texts[1]}]
        chat = {"conversations": turns * (1 + number % 2)}
        rows.append({"text": texts[1]} if number % 5 == 4 else chat)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def contents(folder: Path) -> dict[str, bytes]:
    """All files within but locks, by their paths."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith(".lock")
    }
