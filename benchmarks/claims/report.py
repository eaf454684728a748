"""Compares the papers' claims with the evidence in a folder, as tables."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.claims.evidence import RULE, Evidence, Finding, NotMeasured, Verdict, read_evidence
from benchmarks.claims.papers import PAPERS, Claim
from benchmarks.harness import table

HEADER = ("claim", "published", "ours", "verdict")


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
    if isinstance(claim.check, str):
        return ClaimLine(claim, None, claim.check)
    try:
        return ClaimLine(claim, claim.check(evidence))
    except NotMeasured as error:
        return ClaimLine(claim, None, str(error))


ClaimLines = Mapping[str, Sequence[ClaimLine]]  # of each paper


def claims_of(folder: Path) -> ClaimLines:
    """Compares all claims with a folder."""
    evidence = read_evidence(folder)
    return {
        paper: [examine(claim, evidence) for claim in claims] for paper, claims in PAPERS.items()
    }


def count_of(papers: ClaimLines) -> str:
    """Counts the verdicts in a sentence."""
    count = Counter(line.verdict for lines in papers.values() for line in lines)
    return ", ".join(f"{verdict.value}: {count[verdict]}" for verdict in Verdict) + "."


def tables_of(papers: ClaimLines, level: str = "##") -> str:
    """Formats the claims of each paper as Markdown."""
    parts = []
    for paper, lines in papers.items():
        rows = [(line.claim.text, line.claim.published, line.ours, line.verdict) for line in lines]
        parts.append(f"{level} {paper}\n\n{table(HEADER, rows)}")
    return "\n\n".join(parts)


def report(papers: ClaimLines, about: Mapping[str, Any], alarms: Sequence[str]) -> str:
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
