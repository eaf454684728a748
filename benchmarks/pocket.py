"""Measures all methods on pocket: python -m benchmarks.pocket --out FOLDER

Trees have the published sizes, not those that suit a CPU. All methods and some variants run in
turn, and the parts of rounds are timed. It takes ten minutes on two cores, and writes
docs/results/pocket.md. Repeat the command to go on where it was interrupted; another revision or
machine needs another folder.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks import traces
from benchmarks.harness import main, table
from specjax import LoadedTarget, SpecjaxError, load
from specjax.bench.checks import problems
from specjax.bench.measure import PLAIN
from specjax.bench.options import BenchOptions
from specjax.bench.results import FinishedResults, read_results
from specjax.bench.run import run_bench
from specjax.bench.summary import ALL, Measurement
from specjax.cli.environment import use_compilation_cache
from specjax.core.files import expand_user, write_whole
from specjax.core.folder import RunFolder
from specjax.core.provenance import machine, revision, versions
from specjax.loading.methods import METHODS

PAGE = Path(__file__).parents[1] / "docs" / "results" / "pocket.md"
TEMPLATE = Path(__file__).with_name("pocket.md")
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
    if not traces.read_traces(out):
        settings = published(methods, target)
        traced = BenchOptions(",".join(methods), set=settings, max_new_tokens=num_new)
        traces.measure(out, target, traced)


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
        parts=traces.table_of(traces.read_traces(folder)),
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


if __name__ == "__main__":
    main(run, PocketOptions, __doc__)
