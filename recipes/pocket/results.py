"""Measures pocket with all methods as published, and writes docs/results/pocket.md.

    python -m recipes.pocket.results --out FOLDER

Trees have the sizes of the papers, not those that suit a CPU. All methods and some variants run in
turn; then the settings of PLD+ are swept, the parts of rounds are timed, and the papers' claims are
compared with all that. It takes a quarter of an hour on two cores. Repeat the command to go on
where it was interrupted; another revision or machine needs another folder.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from benchmarks.claims import ablations, traces
from benchmarks.claims.__main__ import claims_of, count_of, tables_of
from benchmarks.claims.evidence import RULE, VARIANTS
from benchmarks.harness import main, table
from specjax import LoadedTarget, load
from specjax.bench.checks import problems
from specjax.bench.measure import PLAIN
from specjax.bench.options import BenchOptions, default_methods
from specjax.bench.results import FinishedResults, read_results
from specjax.bench.run import run_bench
from specjax.bench.summary import ALL, Measurement
from specjax.cli.environment import use_compilation_cache
from specjax.core.files import expand_user, writable, write_whole
from specjax.core.folder import RunFolder
from specjax.core.provenance import machine, revision, versions
from specjax.loading.methods import METHODS

PAGE = Path(__file__).parents[2] / "docs" / "results" / "pocket.md"
TEMPLATE = Path(__file__).with_name("page.md")
UNSUITED = ("grammar", "auto")  # one needs a grammar, the other is another method
TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True)
class Options:
    """Measure pocket, and write its page."""

    out: Annotated[Path, arg(metavar="FOLDER")]
    limit: int = 4
    """Prompts of each kind of task."""
    max_new_tokens: int = 128
    """New tokens per prompt at most."""
    page: Annotated[Path, arg(metavar="FILE")] = PAGE


def run(options: Options) -> None:
    """Measures what is missing, and writes the page."""
    use_compilation_cache()
    folder, target = RunFolder(expand_user(options.out), "results.json"), load("pocket")
    with folder.lock():
        folder.claim({"revision": revision(), "machine": machine(), "versions": versions()})
        measure(folder.path / "bench", target, options)
        text = page_of(folder.path / "bench")
    with writable(options.page):
        write_whole(options.page, text.encode())
    print(f"written to {options.page}")


def measure(out: Path, target: LoadedTarget, options: Options) -> None:
    """Measures what the folder lacks."""
    names = default_methods(target.model, has_parts=True)
    methods = {name: name for name in names if name not in UNSUITED}
    variants = {name: variant.method for name, variant in VARIANTS.items()}
    settings = tuple(f"{name}.{variant.setting}" for name, variant in VARIANTS.items())
    bench = BenchOptions(
        methods=",".join([*methods, *map("=".join, variants.items())]),
        set=published(methods | variants, target) + settings,
        limit=options.limit,
        max_new_tokens=options.max_new_tokens,
        temperature=",".join(f"{t:g}" for t in TEMPERATURES),
        runs=1,
        out=out,
    )
    run_bench(partial(load, "pocket"), bench)
    if not traces.read_traces(out):
        num_new = options.max_new_tokens
        ablations.run(ablations.AblationOptions(out, limit=options.limit, max_new_tokens=num_new))
        settings, names = published(methods, target), ",".join(methods)
        traces.run(traces.TraceOptions(out, methods=names, set=settings, max_new_tokens=num_new))


def published(methods: Mapping[str, str], target: LoadedTarget) -> tuple[str, ...]:
    """Returns the published values of the settings that a CPU replaces, in the form of --set."""
    return tuple(
        f"{name}.{setting}={value}"
        for name, method in methods.items()
        for setting, value in METHODS[method].published(target.config).items()
    )


def page_of(folder: Path) -> str:
    """Returns the page of what a folder holds."""
    results, claims = read_results(folder), claims_of(folder)
    about, alarms = results.about, problems(results.rows)
    facts = ("dtype", "machine", "products", "num_prompts", "max_new_tokens")
    return TEMPLATE.read_text(encoding="utf-8").format(
        **{name: about[name] for name in facts},
        revision=about["revision"][:12],
        alarms=" ".join(alarms) or "All texts equal those of plain decoding, token for token.",
        methods=method_table(results),
        parts=traces.table_of(traces.read_traces(folder).values()),
        count=count_of(claims),
        rule=RULE,
        claims=tables_of(claims, "###"),
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
            *(f"{at[t].mean_accepted_length:.2f}" if t in at else "-" for t in TEMPERATURES),
            *(f"{at[t].ratio:.2f}x" if t in at else "-" for t in TEMPERATURES),
        ]
        for name, at in sorted(found.items(), key=lambda item: -item[1][0.0].mean_accepted_length)
    ]
    return table(["method", "accepted, T=0", "T=1", "speed, T=0", "T=1"], rows)


if __name__ == "__main__":
    main(run, Options, __doc__)
