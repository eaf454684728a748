"""Reads the prompts that the texts and the benchmark are made of."""

import json
from pathlib import Path
from typing import Any

from specjax import SpecjaxError
from specjax.core.files import read_text


def problems_in(folder: Path, ids: range) -> list[dict[str, Any]]:
    """Reads the problems of MBPP with these task ids."""
    rows = rows_of(folder / "mbpp.jsonl", "task_id", "text", "code", "test_list")
    return [row for row in rows if row["task_id"] in ids]


def statement_of(problem: dict[str, Any]) -> str:
    """Returns the statement of a problem and its first test."""
    return f"{problem['text']}\n{problem['test_list'][0]}"


def rows_of(file: Path, *names: str) -> list[dict[str, Any]]:
    """Reads the rows of a JSONL file that have these fields."""
    lines = read_text(file).split("\n")
    try:
        rows = [json.loads(line) for line in lines if line.strip()]
    except ValueError as error:
        raise SpecjaxError(f"{file} is not JSONL: {error}; copy it again") from None
    return [row for row in rows if isinstance(row, dict) and all(name in row for name in names)]
