"""Measures all methods on pocket: python -m benchmarks.pocket --out FOLDER

Trees have the published sizes, not those that suit a CPU. All methods and some variants run in
turn, and the parts of rounds are timed. It takes ten minutes on two cores, and writes
docs/results/pocket.md. Repeat the command to go on where it was interrupted; another revision or
machine needs another folder.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.harness import main, requests_for, table
from specjax import LoadedTarget, SpecjaxError, load, notebook
from specjax.bench.checks import problems
from specjax.bench.measure import PLAIN, with_progress
from specjax.bench.options import BenchOptions
from specjax.bench.results import Condition, FinishedResults, read_results
from specjax.bench.run import make_runners, run_bench
from specjax.bench.summary import ALL, Measurement
from specjax.cli.environment import use_compilation_cache
from specjax.core.files import expand_user, read_json, write_whole
from specjax.core.folder import RunFolder
from specjax.core.provenance import machine, revision, versions
from specjax.loading.methods import METHODS
from specjax.run.runner import Runner

PAGE = Path(__file__).parents[1] / "docs" / "results" / "pocket.md"
TEMPLATE = Path(__file__).with_name("pocket.md")
TRACES = "traces.json"
UNSUITED = ("grammar", "auto")  # one needs a grammar, the other is another method
VARIANTS = {  # a method with a setting
    "disco": ("draft-model", "rule=disco"),
    "heuristic": ("draft-model", "rule=heuristic"),
    **{f"static-{n}": ("draft-model", f"length={n}") for n in (1, 2, 3, 8)},
    "blind": ("eagle2", "noise_share=0"),  # ignores the noise, as published
    "blind-hass": ("hass", "noise_share=0"),
}
TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True)
class PocketOptions:
    """The options of this benchmark."""

    out: Path  # folder of the figures
    limit: int = 4  # prompts of each kind of task
    max_new_tokens: int = 128  # new tokens per prompt at most
    page: Path = PAGE  # the page to write


def run(options: PocketOptions) -> None:
    """Measures what is missing, and writes the page."""
    commit = revision()
    if commit is None or commit.endswith("-dirty"):
        raise SpecjaxError("the page names a revision of the code; commit your changes first")
    use_compilation_cache()
    folder = RunFolder(expand_user(options.out), "about.json")
    with folder.lock():
        folder.claim({"revision": commit, "machine": machine(), "versions": versions()})
        measure(folder.path / "bench", load("pocket"), options)
        text = page_of(folder.path / "bench")
    page = expand_user(options.page)
    write_whole(page, text.encode())
    print(f"written to {page}")


def measure(out: Path, target: LoadedTarget, options: PocketOptions) -> None:
    """Measures what the folder lacks."""
    methods = {name: name for name in METHODS if name not in UNSUITED}
    variants = {name: method for name, (method, _) in VARIANTS.items()}
    varied = tuple(f"{name}.{setting}" for name, (_, setting) in VARIANTS.items())
    num_new = options.max_new_tokens
    bench = BenchOptions(
        methods=",".join([*methods, *map("=".join, variants.items())]),
        set=published(methods | variants, target) + varied,
        limit=options.limit,
        max_new_tokens=num_new,
        temperature=",".join(f"{t:g}" for t in TEMPERATURES),
        runs=1,
        out=out,
    )
    run_bench(lambda: target, bench)
    if not (out / TRACES).is_file():
        settings = published(methods, target)
        traced = BenchOptions(",".join(methods), set=settings, max_new_tokens=num_new)
        measure_parts(out, target, traced)


def measure_parts(folder: Path, target: LoadedTarget, options: BenchOptions) -> None:
    """Times greedy rounds on the first and the last prompt, and keeps the figures in a folder.

    Drafting, verifying and the rest are compiled separately, which takes minutes; a round then
    takes a little longer than in one program.
    """
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


def published(methods: Mapping[str, str], target: LoadedTarget) -> tuple[str, ...]:
    """Returns the published values of what a CPU replaces, also in parts, in the form of --set."""
    named = dict(methods)
    for name, method in methods.items():
        settings = METHODS[method].settings
        named |= {f"{name}.{part}": settings[part] for part in METHODS[method].parts}
    return tuple(
        f"{name}.{setting}={value}"
        for name, method in named.items()
        for setting, value in METHODS[method].published(target.config).items()
    )


def page_of(folder: Path) -> str:
    """Returns the page of what a folder holds; raises SpecjaxError if figures are wrong."""
    results = read_results(folder)
    about = results.about
    wrong = [line for line in problems(results.rows) if not line.startswith("USELESS")]
    if wrong:
        raise SpecjaxError(f"{folder}: {'; '.join(wrong)}")
    facts = ("dtype", "machine", "products", "num_prompts", "max_new_tokens", "revision")
    return TEMPLATE.read_text(encoding="utf-8").format(
        **{name: about[name] for name in facts},
        methods=method_table(results),
        parts=part_table(read_json(folder / TRACES)["methods"]),
    )


def method_table(results: FinishedResults) -> str:
    """Returns accepted lengths and speeds of all methods, the most accepted first."""
    found: dict[str, dict[float, Measurement]] = {}
    for row in results.rows:
        if row.task == ALL and row.method != PLAIN:
            found.setdefault(row.method, {})[row.temperature] = row
    rows = [
        [
            f"`{name}`",
            *(f"{at[t].mean_accepted_length:.2f}" for t in TEMPERATURES),
            *(f"{at[t].ratio:.2f}x" for t in TEMPERATURES),
        ]
        for name, at in sorted(found.items(), key=lambda item: -item[1][0.0].mean_accepted_length)
    ]
    return table(["method", "accepted, T=0", "T=1", "speed, T=0", "T=1"], rows)


def part_table(methods: Iterable[Mapping[str, Any]]) -> str:
    """Returns the milliseconds of each part of a round by method."""
    rows = [
        [one["method"], *(f"{1e3 * one[f'{part}_seconds']:.3f}" for part in notebook.PARTS)]
        for one in methods
    ]
    return table(["ms per round, medians", *notebook.PARTS], rows)


if __name__ == "__main__":
    main(run, PocketOptions, __doc__)
