"""Times the parts of rounds: drafting, verifying and the rest.

Each part is compiled separately, which takes minutes; a round then takes a little longer than in
one program.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.harness import requests_for, table
from specjax import LoadedTarget, notebook
from specjax.bench.measure import with_progress
from specjax.bench.options import BenchOptions
from specjax.bench.results import Condition
from specjax.bench.run import make_runners
from specjax.core.files import read_json
from specjax.core.folder import RunFolder
from specjax.run.runner import Runner

TRACES = "traces.json"


def measure(folder: Path, target: LoadedTarget, options: BenchOptions) -> None:
    """Times greedy rounds on the first and the last prompt, and keeps the figures in a folder."""
    first, *others = requests_for(target, options.tasks, 1, options.max_new_tokens)
    prompts = [first, *others[-1:]]
    runners = make_runners(target, options, prompts, Condition(0.0, 1))
    methods = trace(runners, [prompt.ids for prompt in prompts])
    RunFolder(folder).write_json(TRACES, {"methods": methods})


def trace(runners: Sequence[Runner], prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Times all methods in turn on every prompt, after compiling; returns their figures."""
    for runner in with_progress(runners, "Compiling the parts of rounds"):
        list(notebook.timed_rounds(runner, prompts[0]))
    timed = [[list(notebook.timed_rounds(runner, ids)) for runner in runners] for ids in prompts]
    return [
        round_figures(runner.name, list(chain(*of_method)))
        for runner, of_method in zip(runners, zip(*timed, strict=True), strict=True)
    ]


def round_figures(name: str, rounds: Sequence[notebook.Round]) -> dict[str, Any]:
    """Returns the figures of a method's rounds; seconds are medians."""
    seconds = {
        f"{part}_seconds": median(getattr(one, part) for one in rounds) for part in notebook.PARTS
    }
    return {
        "method": name,
        "num_rounds": len(rounds),
        "accepted_length": fmean(one.num_tokens for one in rounds),
        **seconds,
    }


def read_traces(folder: Path) -> list[Mapping[str, Any]]:
    """Returns the figures of each method that a folder holds."""
    file = folder / TRACES
    return read_json(file)["methods"] if file.is_file() else []


def table_of(methods: Iterable[Mapping[str, Any]]) -> str:
    """Returns the milliseconds of each part of a round by method."""
    rows = [
        [one["method"], *(f"{1e3 * one[f'{part}_seconds']:.3f}" for part in notebook.PARTS)]
        for one in methods
    ]
    return table(["ms per round, medians", *notebook.PARTS], rows)
