"""The claims as a table in the terminal, as Markdown and as JSON."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specjax.bench.claims.findings import NUM_DRAWS, RULE, Line, Verdict
from specjax.core.files import writable

JSON_FILE, MARKDOWN_FILE = "claims.json", "claims.md"
HEADER = ("claim", "published", "ours", "verdict")
STYLES = {Verdict.HOLDS: "green", Verdict.FAILS: "red", Verdict.UNDECIDED: "yellow"}
WIDTH = 150  # even where a terminal is narrower: no number is cut off


def show(lines: Sequence[Line], about: Mapping[str, Any], alarms: Sequence[str]) -> None:
    """Prints the claims of each paper, the rule, and in red whatever makes them worthless."""
    console = Console(markup=False, highlight=False, width=max(Console().width, WIDTH))
    table = Table(*HEADER, box=None, pad_edge=False)
    paper = None
    for line in lines:
        if line.claim.paper != paper:
            paper = line.claim.paper
            table.add_row(paper, style="bold")
        cells = line.claim.text, line.claim.published, line.ours, line.verdict.value
        table.add_row(*cells, style=STYLES.get(line.verdict, "dim"))
    console.print(table)
    console.print(RULE)
    console.print(told(lines), facts(about))
    for alarm in alarms:
        console.print(alarm, style="bold red")


def told(lines: Sequence[Line]) -> str:
    """How many claims came to what."""
    count = Counter(line.verdict for line in lines)
    return ", ".join(f"{verdict.value}: {count[verdict]}" for verdict in Verdict) + "."


def facts(about: Mapping[str, Any]) -> str:
    """Where, on what, and how long it was measured."""
    return (
        f"{about['target']} ({about['dtype']}) on {about['device']}, {about['prompts']} prompts, "
        f"{about['runs']} runs of {about['max_new_tokens']} tokens at most, "
        f"{about['minutes']:.1f} minutes."
    )


def markdown(lines: Sequence[Line], about: Mapping[str, Any], alarms: Sequence[str]) -> str:
    """One table per paper."""
    parts = ["# What the papers claim, measured on pocket"]
    if alarms:
        parts.append("\n".join(["**WRONG WITH THESE RESULTS**", "", *(f"- {a}" for a in alarms)]))
    parts += [f"{told(lines)} {facts(about)}", f"    {about['command']}", RULE]
    for paper in dict.fromkeys(line.claim.paper for line in lines):
        rows = [HEADER, ("---",) * len(HEADER)]
        rows += [
            (line.claim.text, line.claim.published, line.ours, line.verdict.value)
            for line in lines
            if line.claim.paper == paper
        ]
        table = ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
        parts.append("\n".join([f"## {paper}", "", *table]))
    return "\n\n".join(parts) + "\n"


def write(
    folder: Path,
    lines: Sequence[Line],
    about: Mapping[str, Any],
    alarms: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """Writes both files; the JSON has the rows of all methods as well.

    Raises:
        SpecjaxError: if they cannot be written.
    """
    values = {
        "about": {**about, "num_draws": NUM_DRAWS},
        "rule": RULE,
        "alarms": list(alarms),
        "claims": [as_values(line) for line in lines],
        "rows": list(rows),
    }
    texts = {
        JSON_FILE: json.dumps(values, indent=1, ensure_ascii=False) + "\n",
        MARKDOWN_FILE: markdown(lines, about, alarms),
    }
    for name, text in texts.items():
        with writable(folder / name):
            (folder / name).write_text(text, encoding="utf-8")


def as_values(line: Line) -> dict[str, Any]:
    """A line for JSON."""
    claim, finding = line.claim, line.finding
    return {
        "paper": claim.paper,
        "claim": claim.text,
        "published": claim.published,
        "ours": line.ours,
        "verdict": line.verdict.value,
        **({} if finding is None else finding.spread._asdict()),
    }


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
