"""Compares the papers' claims with a finished benchmark: python -m benchmarks.claims FOLDER

FOLDER is that of `specjax bench --methods all --temperature 0,1 --out FOLDER`; the claims read what
is there. `python -m benchmarks.claims.ablations --out FOLDER` adds evidence, and so does `python -m
benchmarks.claims.traces --out FOLDER`; claims without any are listed with the command that would
measure them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tyro.conf import Positional

from benchmarks.claims.checks import Check
from benchmarks.claims.evidence import RULE, Evidence, Finding, NotMeasured, Verdict, read_evidence
from benchmarks.claims.papers import PAPERS, Claim
from benchmarks.harness import main, table
from specjax.bench.checks import problems
from specjax.bench.results import read_results
from specjax.core.files import expand_user, writable

HEADER = ("claim", "published", "ours", "verdict")


@dataclass(frozen=True)
class ClaimsOptions:
    """The options of this benchmark."""

    folder: Positional[Path]  # folder of a finished `specjax bench --out`
    out: str = ""  # also write the report to this Markdown file


class ClaimLine(NamedTuple):
    """A claim and its outcome."""

    claim: Claim
    finding: Finding | None
    command: str = ""  # that would measure it

    @property
    def verdict(self) -> Verdict:
        """The outcome in a word or two."""
        return Verdict.NOT_MEASURED if self.finding is None else self.finding.verdict

    @property
    def ours(self) -> str:
        """Our figure with its spread, or the command that would measure it."""
        return self.command if self.finding is None else self.finding.ours


def examine(claim: Claim, evidence: Evidence) -> ClaimLine:
    """Compares a claim with the evidence."""
    if not isinstance(claim.check, Check):
        return ClaimLine(claim, None, claim.check)
    try:
        return ClaimLine(claim, claim.check(evidence))
    except NotMeasured as error:
        return ClaimLine(claim, None, str(error))


Lines = Mapping[str, Sequence[ClaimLine]]  # of each paper


def claims_of(folder: Path) -> Lines:
    """Compares all claims with a folder."""
    evidence = read_evidence(folder)
    return {
        paper: [examine(claim, evidence) for claim in claims] for paper, claims in PAPERS.items()
    }


def count_of(papers: Lines) -> str:
    """Counts the verdicts in a sentence."""
    count = Counter(line.verdict for lines in papers.values() for line in lines)
    return ", ".join(f"{verdict.value}: {count[verdict]}" for verdict in Verdict) + "."


def tables_of(papers: Lines, level: str = "##") -> str:
    """Formats the claims of each paper as Markdown."""
    parts = []
    for paper, lines in papers.items():
        rows = [(line.claim.text, line.claim.published, line.ours, line.verdict) for line in lines]
        parts.append(f"{level} {paper}\n\n{table(HEADER, rows)}")
    return "\n\n".join(parts)


def report(papers: Lines, about: Mapping[str, Any], alarms: Sequence[str]) -> str:
    """Formats the claims, and what they are about, as Markdown."""
    parts = ["# The papers' claims, measured"]
    if alarms:
        parts.append("\n".join(["**WRONG WITH THESE RESULTS**", "", *(f"- {a}" for a in alarms)]))
    facts = ("target", "dtype", "device", "tasks", "num_prompts", "runs", "max_new_tokens")
    parts += [
        count_of(papers),
        "; ".join(f"{name} {about[name]}" for name in facts if name in about),
        f"    {about.get('command', '')}",
        RULE,
        tables_of(papers),
    ]
    return "\n\n".join(parts) + "\n"


def run(options: ClaimsOptions) -> None:
    """Prints the report, and writes it to `--out`."""
    folder = expand_user(options.folder)
    results = read_results(folder)
    text = report(claims_of(folder), results.about, problems(results.rows))
    print(text)
    if options.out:
        path = expand_user(options.out)
        with writable(path):
            path.write_text(text, encoding="utf-8")
        print(f"written to {path}")


if __name__ == "__main__":
    main(run, ClaimsOptions, __doc__)
