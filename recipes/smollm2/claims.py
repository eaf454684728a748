"""Runs tables of the papers on SmolLM2, and decides the claims that they support.

    python -m recipes.smollm2.claims --target TARGET --data FOLDER --out FOLDER [--runs FOLDER]

`claims.toml` lists the tables and the claims. The data folder is that of `specjax reproduce`, with
the data of all tables. The command takes two hours on two cores, and goes on where it
was interrupted. At the end it writes docs/results/papers.json and, from it, the table of
docs/results/papers.md. Without options it only writes the latter again.
"""

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from benchmarks.harness import main
from recipes.papers.recipe import read_recipe
from recipes.papers.variants import alias
from recipes.smollm2.checks import (
    MIN_COUNT,
    Finding,
    Samples,
    Spread,
    Verdict,
    accepts_more,
    accepts_more_deeper,
    decide,
    drafts_vary,
    faster,
    runs_of,
)
from recipes.smollm2.page import ROOT, quoted, table
from specjax import SpecjaxError
from specjax.bench.measure import Sample
from specjax.bench.results import Condition, read_samples
from specjax.core.files import expand_user, read_json, write_whole
from specjax.models.io.classifier import load_classifier

HERE = Path(__file__).parent
TABLES = tomllib.loads((HERE / "claims.toml").read_text(encoding="utf-8"))
RESULTS = ROOT / "docs" / "results" / "papers.json"
PAGE = RESULTS.with_suffix(".md")
MARGIN = 0.02  # of figures without a spread
CHECKS: Mapping[str, Callable[..., Finding]] = {
    "accepted": accepts_more,
    "speed": faster,
    "depth": accepts_more_deeper,
    "variation": drafts_vary,
}


@dataclass(frozen=True)
class Options:
    """Run tables of the papers on SmolLM2, and decide their claims."""

    target: str = ""
    data: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("questions")
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("runs/papers")
    runs: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("runs")
    """The folder of drafters that do not ship."""

    def run(self) -> None:
        """Measures, if there is a target, and writes the results and the page."""
        if self.target:
            for name in TABLES:
                self._reproduce(name)
            results = decided(expand_user(self.out), self.target)
            write_whole(RESULTS, json.dumps(results, indent=1).encode())
        write_whole(PAGE, quoted(PAGE, table_of(read_json(RESULTS))).encode())
        print(f"written to {PAGE}")

    def _reproduce(self, name: str) -> None:
        spec = TABLES[name]
        drafters = spec.get("drafters", {}).items()
        folders = {
            method: (HERE if place.startswith("heads/") else self.runs) / place
            for method, place in drafters
        }
        flags = [f"--drafter={method}={folder}" for method, folder in folders.items()]
        flags += [f"--limit={spec['limit']}", f"--max-new-tokens={spec['max_new_tokens']}"]
        flags += [f"--data={self.data}", f"--out={self.out}", "--runs=1", "--dtype=bfloat16"]
        command = [sys.executable, "-m", "specjax", "reproduce", name, f"--target={self.target}"]
        if subprocess.run([*command, *flags]).returncode:  # its folders name this command
            raise SpecjaxError(f"{name} did not end; run the same command again")


def decided(out: Path, target: str) -> dict[str, Any]:
    """Returns all claims with the figures of a target, from the folder of `specjax reproduce`."""
    folders = {path.parent: read_json(path) for path in sorted(out.glob("bench/*/run.json"))}
    folders = {path: about for path, about in folders.items() if about["target"] == target}
    if not folders:
        raise SpecjaxError(f"{out}/bench has no benchmark of {target}; run the command again")
    revisions = {about["revision"] for about in folders.values()}
    if len(revisions) != 1:
        raise SpecjaxError(f"{out}/bench holds revisions {sorted(revisions)}, not one; delete it")
    rows = []
    for name, spec in TABLES.items():
        samples = _samples(
            folder for folder, about in folders.items() if f" {name} " in about["command"]
        )
        data = tuple(read_recipe(name).data)
        for text, kind, methods, published, *settings in spec["claims"]:
            if kind == "f1":
                finding = _prediction(out / "classifiers", *methods)
            else:
                condition = {"on": data, "temperature": 0.0, **dict(*settings)}
                on, temperature = condition.pop("on"), condition.pop("temperature")
                runs = [runs_of(samples, alias(name), on, temperature) for name in methods]
                finding = CHECKS[kind](*runs, **condition)
            row = {"table": name, "claim": text, "ours": finding.ours, "published": published}
            rows.append(row | {"verdict": finding.verdict.value})
    return {"revision": revisions.pop(), "claims": rows}


def _samples(folders: Iterable[Path]) -> Samples:
    """Returns the timed runs of some benchmarks together."""
    samples: dict[Condition, list[Sample]] = {}
    for folder in folders:
        for condition, runs in read_samples(folder).items():
            samples.setdefault(condition, []).extend(runs)
    return samples


def _prediction(folder: Path, model: str) -> Finding:
    """Compares a classifier's F1 with that of a fixed draft length."""
    found = [*folder.glob(f"{model}-*")]
    if len(found) != 1:
        raise SpecjaxError(f"{folder} has {len(found)} classifiers of {model}, not one; delete it")
    scores = load_classifier(found[0]).scores
    first, second = (100 * scores[name] for name in ("f1", "static_f1"))
    ratio = first / second
    spread = Spread(ratio, ratio * (1 - MARGIN), ratio * (1 + MARGIN))
    return Finding(
        spread, f"{first:.0f} / {second:.0f} = {ratio:.2f}", decide(spread, 1.0, MIN_COUNT)
    )


def table_of(results: dict[str, Any]) -> str:
    """Counts the verdicts and lists the claims."""
    names = ("table", "claim", "ours", "published", "verdict")
    rows = [[f"`{row['table']}`", *(row[name] for name in names[1:])] for row in results["claims"]]
    holds, fails, undecided = (sum(row[-1] == word for row in rows) for word in Verdict)
    return (
        f"Measured at revision {results['revision'][:12]}: {holds} of {len(rows)} claims hold, "
        f"{fails} do not, {undecided} are undecided.\n\n{table(names, rows)}\n"
    )


if __name__ == "__main__":
    main(Options.run, Options, __doc__)
