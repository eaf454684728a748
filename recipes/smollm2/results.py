"""Measures SmolLM2-135M-Instruct with all methods, beside other libraries, and writes the results.

    python -m recipes.smollm2.results --target TARGET --data FOLDER --out FOLDER

The data folder holds `spec_bench.jsonl`, `mbpp.jsonl` and an English text, `wiki_demo.txt`. The
questions are first turns of Spec-Bench's six groups, MBPP's problems, and edits: rename a function,
correct the spelling of a text. The command takes half an hour on two cores with AVX-512, and three
times as long on older ones. It goes on where it was interrupted, unless the revision or the machine
has changed. At the end it writes docs/results/smollm2.json and, from it, the page, the chart, and
the figures of README.md and docs/index.md. Without options it only writes the latter again.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

from benchmarks.harness import main
from benchmarks.rows import pass_seconds
from recipes.smollm2.many_heads import ALL_KEPT, ALL_RUNS
from recipes.smollm2.page import FIGURES, NODES, ROOT, UNTRAINED, WIDTHS, Figures, write_pages
from recipes.smollm2.questions import PER_KIND, questions_in
from specjax import SpecjaxError, load
from specjax.bench.options import BenchOptions
from specjax.bench.results import read_results
from specjax.bench.run import run_bench
from specjax.bench.summary import Measurement
from specjax.cli.environment import use_compilation_cache
from specjax.core.files import expand_user, read_json, write_whole
from specjax.core.folder import RunFolder
from specjax.core.provenance import machine, revision, versions
from specjax.loading.methods import METHODS
from specjax.models.precision import cheap_rows
from specjax.training.run_folder import METRICS

HEADS = Path(__file__).with_name("heads")
FOLDERS = {  # what a method reads
    **{name: name for name in ("medusa", "parallel-medusa", "eagle", "parallel-eagle", "eagle3")},
    **{"eagle2": "eagle", "hass": "hass", "hybrid": "hass"},
    **{"rest": "datastore", "draft-model": "draft/model"},
}
SAMPLED = ("pld-plus", "pld+recycling", "hass", "hybrid")
COMBINED = {"hybrid": ("pld-plus", "hass"), "pld+recycling": ("pld", "recycling")}
SIZED = ("pld-plus", "recycling", "hass", *COMBINED)  # measured with trees of several sizes
PASSES, BFLOAT16 = "passes.json", "bfloat16"
SLOTS = 640  # of the cache in passes that are timed
SETTINGS = {  # others have the defaults of a CPU
    "recycling": {"seeded": True},
    "pld+recycling": {"copy": "pld", "head": "recycling", "head.seeded": True},
}


class Part(NamedTuple):
    """A benchmark: its methods, the options that differ, and the weights."""

    methods: tuple[str, ...]
    options: Mapping[str, Any] = {}
    quantize: str | None = None
    nodes: int = 0  # of trees; 0: the default


PARTS = {  # the first is the one that the others need
    "greedy": Part((*UNTRAINED, *FOLDERS), {"peers": "transformers,llama.cpp"}),
    "int8": Part(("pld-plus",), quantize="int8"),
    "int4": Part(("pld-plus",), quantize="int4"),
    "sampled": Part(SAMPLED, {"temperature": "1"}),
    "batches": Part(SAMPLED, {"temperature": "0,1", "batch": "4"}),
    **{f"nodes-{nodes}": Part(SIZED, {"limit": 2}, nodes=nodes) for nodes in NODES},
}


@dataclass(frozen=True)
class Options:
    """Measure SmolLM2 with all methods, and write the results."""

    target: str = ""
    data: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("prompts")
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("runs/results")
    runs: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("runs")
    """The folder of drafters that do not ship, and of the records of all trainings."""

    def run(self) -> None:
        """Measures, if there is a target, and writes figures, pages and chart."""
        if self.target:
            write_whole(FIGURES, json_of(self.measured()).encode())
        for path in write_pages(Figures(**read_json(FIGURES)), ROOT):
            print(f"written to {path}")

    def measured(self) -> dict[str, Any]:
        """Measures what is missing, and returns all figures."""
        if Path(self.target).suffix != ".gguf":
            raise SpecjaxError("--target must be the GGUF file, which llama.cpp reads as well")
        use_compilation_cache()
        folder = RunFolder(expand_user(self.out), "results.json")
        with folder.lock():
            about = {"revision": revision(), "machine": machine(), "versions": versions()}
            folder.claim(about | {"target": Path(self.target).name})
            folder.write_records("questions.jsonl", questions_in(expand_user(self.data)))
            sources = sources_at(expand_user(self.runs))
            for number, name in enumerate(PARTS, 1):
                print(f"part {number} of {len(PARTS)}: {name}", file=sys.stderr, flush=True)
                self._measure(name, sources, folder.path)
            if not (folder.path / PASSES).exists():
                folder.write_json(PASSES, self._passes())
        return figures_of(folder, expand_user(self.runs))

    def _measure(self, name: str, sources: Mapping[str, Path], out: Path) -> None:
        part = PARTS[name]
        methods = [name for name in part.methods if name in sources or name not in FOLDERS]
        settings = [
            f"{method}.{key}={value}"
            for method in methods
            for key, value in settings_of(method, part.nodes).items()
        ]
        options = BenchOptions(
            methods=",".join(f"{method}=hybrid" if "+" in method else method for method in methods),
            drafter=tuple(f"{method}={sources[method]}" for method in methods if method in sources),
            set=tuple(settings),
            tasks=str(out / "questions.jsonl"),
            max_new_tokens=64,
            runs=1,
            out=out / name,
            **{"limit": PER_KIND, **part.options},
        )
        run_bench(partial(load, self.target, quantize=part.quantize), options)

    def _passes(self) -> dict[str, Any]:
        """Times passes over few and many tokens, with all weights."""
        seconds, nodes = {}, 0
        for weights in (BFLOAT16, "int8", "int4"):
            quantize = weights if weights != BFLOAT16 else None
            print(f"passes in {weights}", file=sys.stderr, flush=True)
            target = load(self.target, BFLOAT16, quantize=quantize)
            seconds[weights] = pass_seconds(target, WIDTHS, SLOTS, count=32, repeats=5)
            nodes = cheap_rows(target.config)
        return {"passes": seconds, "nodes": nodes}


def settings_of(method: str, nodes: int) -> dict[str, Any]:
    """Returns the settings of a method, with trees of `nodes` nodes; 0: the default."""
    settings = dict(SETTINGS.get(method, {}))
    if nodes:
        settings |= METHODS["hybrid" if method in COMBINED else method].on_cpu(nodes)
        for part, drafts in zip(("copy", "head"), COMBINED.get(method, ()), strict=False):
            sizes = METHODS[drafts].on_cpu(nodes)
            settings |= {f"{part}.{name}": value for name, value in sizes.items()}
    return settings


def sources_at(runs: Path) -> dict[str, Path]:
    """Returns the folder of each method whose drafter exists; prints what is missing."""
    sources = {}
    for method, name in FOLDERS.items():
        folders = [HEADS / name, runs / name / "head", runs / name]
        if existing := [folder for folder in folders if folder.exists()]:
            sources[method] = existing[0]
        else:
            print(f"without {method}: {folders[-1]} is not there", file=sys.stderr)
    return sources


def figures_of(folder: RunFolder, runs: Path) -> dict[str, Any]:
    """Returns the figures of all parts, and what they are about."""
    parts = {name: read_results(folder.path / name) for name in PARTS}
    about = read_json(folder.path / folder.config)
    flags = f"--target {about['target']} --data prompts --out runs/results"
    about["command"] = f"python -m recipes.smollm2.results {flags}"
    first = parts["greedy"].about
    if others := [name for name in parts if parts[name].about["revision"] != about["revision"]]:
        raise SpecjaxError(f"{folder.path / others[0]} has another revision; delete this folder")
    names = ("dtype", "products", "num_prompts", "max_new_tokens", "bandwidth")
    about |= {name: first[name] for name in names} | read_json(folder.path / PASSES)
    about["curves"] = curves_at(runs)
    rows = [row_of(name, row) for name, part in parts.items() for row in part.rows]
    shown = [row for row in rows if row["part"] == "greedy" or row["task"] == "all"]
    return {"about": about, "rows": shown}


def curves_at(runs: Path) -> dict[str, dict[str, float]]:
    """Returns the accepted lengths that each training measured, by step.

    Of a head that ships without its run folder, only the step that was kept is known.
    """
    curves = {}
    for name in ALL_RUNS:
        rows = RunFolder(runs / name).records(METRICS)
        lengths = {r["step"]: r["accepted_length"] for r in rows if "accepted_length" in r}
        if not lengths and (shipped := [head for head, run in ALL_KEPT.items() if run == name]):
            kept = read_json(HEADS / shipped[0] / "config.json")["specjax"]
            lengths = {kept["step"]: kept["score"]}
            print(f"without the curve of {name}: {runs / name} is not there", file=sys.stderr)
        if lengths:
            curves[name] = {str(step): round(length, 2) for step, length in lengths.items()}
    return curves


def row_of(part: str, row: Measurement) -> dict[str, Any]:
    """Returns the figures of a measurement that the pages show."""
    return {
        "part": part,
        "method": row.method,
        "task": row.task,
        "temperature": row.temperature,
        "batch": row.batch,
        "speed": round(row.ratio, 3),
        "quartiles": [round(value, 3) for value in row.ratio_quartiles],
        "tokens_per_second": round(row.tokens_per_second, 2),
        "accepted": round(row.mean_accepted_length, 3),
        "round": row.round_overhead and round(row.round_overhead, 3),
        "different": row.num_near_ties + row.num_different if row.is_compared else None,
    }


def json_of(figures: Mapping[str, Any]) -> str:
    """Writes figures as JSON, a row in each line."""
    rows = ",\n".join(map(json.dumps, figures["rows"]))
    return f'{{"about": {json.dumps(figures["about"], indent=1)},\n"rows": [\n{rows}\n]}}\n'


if __name__ == "__main__":
    main(Options.run, Options, __doc__)
