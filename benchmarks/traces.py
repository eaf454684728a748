"""Times the parts of rounds: python -m benchmarks.traces --out FOLDER

Prints how long drafting, verifying and the rest of a round take with each method on the first and
the last prompt, and keeps the figures in FOLDER. Each part is compiled separately, which takes
minutes; a round then takes a little longer than in one program.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

from tyro.conf import UseAppendAction, arg

from benchmarks.harness import at_least_1, main, requests_for, table
from specjax import load, notebook
from specjax.bench.measure import with_progress
from specjax.bench.options import BenchOptions
from specjax.bench.results import Condition
from specjax.bench.run import make_runners
from specjax.core.files import read_json, writable_folder
from specjax.core.folder import RunFolder
from specjax.run.runner import Runner

TRACES = "traces.json"


@dataclass(frozen=True)
class TraceOptions:
    """The options of this benchmark."""

    out: Path  # folder for the figures
    target: str = "pocket"  # pocket, a folder in Hugging Face format, or a hub id
    methods: str = "all"  # as in `specjax bench --methods`
    set: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="METHOD.NAME=VALUE")] = ()
    tasks: str = "pocket"  # as in `specjax bench --tasks`
    max_new_tokens: int = 128  # new tokens per prompt at most


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


def read_traces(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Returns the figures in a folder by method."""
    file = folder / TRACES
    methods = read_json(file)["methods"] if file.is_file() else ()
    return {figures["method"]: figures for figures in methods}


def run(options: TraceOptions) -> None:
    """Times the rounds of all methods, prints their parts and keeps the figures."""
    at_least_1(options, "max_new_tokens")
    folder, target = writable_folder(options.out), load(options.target)
    first, *others = requests_for(target, options.tasks, 1, options.max_new_tokens)
    prompts = [first, *others[-1:]]
    bench = BenchOptions(
        methods=options.methods, set=options.set, max_new_tokens=options.max_new_tokens
    )
    runners = make_runners(target, bench, prompts, Condition(0.0, 1))
    methods = trace(runners, [prompt.ids for prompt in prompts])
    RunFolder(folder).write_json(TRACES, {"methods": methods})
    print(table_of(methods))


def table_of(methods: Iterable[Mapping[str, Any]]) -> str:
    """Returns the milliseconds of each part of a round by method."""
    rows = [
        [one["method"], *(f"{1e3 * one[f'{part}_seconds']:.3f}" for part in notebook.PARTS)]
        for one in methods
    ]
    return table(["ms per round, medians", *notebook.PARTS], rows)


if __name__ == "__main__":
    main(run, TraceOptions, __doc__)
