"""`specjax tune machine`: the fastest method on this device, and how it was found."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from specjax.bench.measure import PLAIN, Request
from specjax.bench.options import names_in, sources_in
from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user
from specjax.decoding.sampling import Sampling
from specjax.hub import LoadedTarget
from specjax.methods import check_settings
from specjax.models.pass_costs import RowCosts
from specjax.tuning.candidates import Family
from specjax.tuning.machine import AUTO, NUM_RUNS, Report, Result, tune_machine
from specjax.tuning.prediction import Candidate
from specjax.tuning.search import Outcome
from specjax.tuning.serving import Serving

if TYPE_CHECKING:
    from specjax.cli.tune import Tune

TABLE_WIDTH = 130  # even where a terminal is narrower: no number is cut off


def check(options: "Tune") -> None:
    """Raises SpecjaxError for methods, folders or a temperature that cannot be."""
    Sampling(options.temperature)
    for name in (*names_in(options.methods), *sources_in(options.drafter)):
        check_settings(name, {})
        if name in (PLAIN, AUTO):
            raise SpecjaxError(f"{name} is no method to be tried; leave it out")


def tune(options: "Tune", target: LoadedTarget, requests: Sequence[Request]) -> dict[str, Any]:
    """The settings of `auto` on this device.

    Raises:
        SpecjaxError: for a method whose weights or data are missing or do not fit.
    """
    serving = Serving(
        target,
        requests,
        options.max_new_tokens,
        Sampling(options.temperature),
        {name: _absolute(source) for name, source in sources_in(options.drafter).items()},
    )
    tables = Tables()
    report = Report(tables.costs, tables.family, tables.finalists, tables.results)
    found = tune_machine(serving, names_in(options.methods), report)
    told = ", ".join(f"{name}={value}" for name, value in found["settings"].items())
    print(f"on {found['device']}: {AUTO} is {found['method']}" + (f" with {told}" if told else ""))
    if found["method"] != PLAIN:
        print("its passes run at " + ", ".join(map(str, found["row_widths"])) + " rows")
    return found


def _absolute(source: str) -> str:
    """A folder's place, wherever one stands later; a hub id as it is."""
    folder = expand_user(source)
    return str(folder.resolve()) if folder.exists() else source


def _wide() -> Console:
    width = max(Console().width, TABLE_WIDTH)
    return Console(soft_wrap=True, markup=False, highlight=False, width=width)


@dataclass
class Tables:
    """Prints what is found, as it comes."""

    output: Console = field(default_factory=_wide)
    notes: Console = field(default_factory=lambda: Console(stderr=True, highlight=False))
    families: Table = field(
        default_factory=lambda: Table(
            *("family, at its best", "accepted", "rows", "x plain"),
            title="Predicted, prefill apart",
            box=None,
        )
    )

    def costs(self, costs: RowCosts) -> None:
        """What a pass costs by its rows."""
        table = Table("rows", *map(str, costs.widths), title="The target's pass", box=None)
        table.add_row("x one row", *(f"{cost:.2f}" for cost in costs.costs))
        self.output.print(table)

    def family(self, family: Family, outcome: Outcome) -> None:
        """The best member of a family, or why it was not tried."""
        if self.notes.is_terminal:
            self.notes.print(f"{family.method}: {family.shape} done")
        if isinstance(outcome, str):
            self.families.add_row(f"{family.method} ({family.shape})", "-", "-", outcome)
            return
        best = max(outcome, key=lambda candidate: candidate.speed)
        cells = f"{best.accepted_length:.2f}", str(best.num_nodes), f"{best.speed:.2f}"
        self.families.add_row(best.name, *cells)

    def finalists(self, candidates: Sequence[Candidate]) -> None:
        """All families, before the best few of their members are measured."""
        self.output.print(self.families)
        if not candidates:
            self.output.print("nothing comes near plain decoding, so nothing is measured")

    def results(self, results: Sequence[Result]) -> None:
        """What was measured."""
        if not results:
            return
        columns = "predicted", "x plain", "quartiles", "accepted", "tokens/s"
        title = f"Measured in {NUM_RUNS} turns with plain decoding, prefill included"
        table = Table("finalist", *columns, title=title, box=None)
        for result in sorted(results, key=lambda result: -result.speed):
            low, high = result.quartiles
            table.add_row(
                result.candidate.name,
                f"{result.candidate.speed:.2f}",
                f"{result.speed:.2f}",
                f"{low:.2f}-{high:.2f}",
                f"{result.accepted_length:.2f}",
                f"{result.tokens_per_second:.0f}",
            )
        self.output.print(table)
