"""What heads are worth: `python -m specjax.bench.heads --head NAME=FOLDER ...`; EAGLE comes first.

Measures every head behind EAGLE-2's tree in turn on the same prompts, the first one also behind
EAGLE's static tree, and above temperature 0 behind the published tree that does not see the noise.
Then tells the acceptance rate at every depth (HASS, figure 5).
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import tyro
from rich.console import Console
from rich.table import Table
from tyro.conf import UseAppendAction

from specjax.bench.acceptance import acceptance, advice
from specjax.bench.measure import PLAIN, Measurement, Request
from specjax.bench.run import OwnMethod, compare
from specjax.bench.tasks import read_tasks, token_ids
from specjax.decoding.drafter import Params
from specjax.decoding.prompt import BUCKET
from specjax.decoding.sampling import Sampling
from specjax.drafting import load_drafter
from specjax.errors import SpecjaxError, exit_code
from specjax.hub import POCKET, Target, load

TABLE_WIDTH = 150  # even where a terminal is narrower: no number is cut off
STATIC, BLIND = "{} (static tree)", "{} (tree blind to the noise)"


@dataclass(frozen=True)
class Options:
    """What are heads worth?"""

    target: str = POCKET
    """The model: pocket, a folder in Hugging Face format, or a hub id."""
    head: UseAppendAction[tuple[str, ...]] = ()
    """A head as NAME=FOLDER: the run folder of `specjax train`, or a head as published. May be
    given several times; by default pocket's own two."""
    tasks: str = POCKET
    """pocket for edits and completions of its held-out code, or a JSONL file."""
    limit: int = 4
    """Prompts of each kind of task."""
    max_new_tokens: int = 128
    """Stop after so many new tokens, if the text has not ended before."""
    top_k: int = 10
    """Of EAGLE-2's tree, as are the next two."""
    depth: int = 6
    """Tokens of its longest path."""
    num_tokens: int = 60
    """Its nodes, root included; every node is a row of the target's pass."""
    temperature: tuple[float, ...] = (0.0, 1.0)
    """One table for each."""
    runs: int = 3
    """How often each method runs each prompt."""


def contestants_of(
    target: Target, heads: dict[str, str | None], options: Options, temperature: float, longest: int
) -> list[OwnMethod]:
    """Plain decoding, the static tree, and EAGLE-2's tree with every head.

    Raises:
        SpecjaxError: for a head that is missing or does not fit.
    """
    first = next(iter(heads))
    asked: list[tuple[str, str, str | None, dict[str, Any]]] = [(PLAIN, PLAIN, None, {})]
    asked.append((STATIC.format(first), "eagle", heads[first], {}))
    tree = {name: getattr(options, name) for name in ("top_k", "depth", "num_tokens")}
    asked += [(name, method_of(name, folder), folder, tree) for name, folder in heads.items()]
    if temperature > 0:
        blind = {**tree, "noise_share": 0.0}
        asked.append((BLIND.format(first), method_of(first, heads[first]), heads[first], blind))
    made = []
    for name, method, folder, settings in asked:
        drafter, params = load_drafter(method, target, folder, **settings)
        made.append(
            OwnMethod(
                name=name,
                target=target,
                drafter=drafter,
                params=Params(target.params, params),
                sampling=Sampling(temperature),
                max_new_tokens=options.max_new_tokens,
                padded_length=-(-longest // BUCKET) * BUCKET,
                seed=0,
            )
        )
    return made


def method_of(name: str, folder: str | None) -> str:
    """Pocket's own heads are named by their method; all others draft as `eagle2`."""
    return "hass" if folder is None and name == "hass" else "eagle2"


def heads_in(assignments: Sequence[str], target: str) -> dict[str, str | None]:
    """Name -> folder, from texts of the form NAME=FOLDER; None is pocket's own.

    Raises:
        SpecjaxError: for a text of another form, or no head for a target that has none.
    """
    if not assignments and target != POCKET:
        raise SpecjaxError("no heads are given; add --head NAME=FOLDER")
    found: dict[str, str | None] = {}
    for assignment in assignments:
        name, equals, folder = assignment.partition("=")
        if not (name and equals and folder):
            raise SpecjaxError(f"--head {assignment!r} is not NAME=FOLDER; write hass=runs/hass")
        if name in found:
            raise SpecjaxError(f"--head names {name} twice; give each a name of its own")
        found[name] = folder
    return found or {"eagle2": None, "hass": None}


def speed_table(rows: Sequence[Measurement], temperature: float) -> Table:
    """Accepted length by task, then over all tasks with the speed."""
    tasks = list(dict.fromkeys(row.task for row in rows))
    lengths = {(row.method, row.task): f"{row.mean_accepted_length:.2f}" for row in rows}
    table = Table(f"T={temperature:g}: accepted length", *tasks, "x plain", "same", box=None)
    for row in rows:
        if row.task == tasks[-1]:
            low, high = row.ratio_quartiles
            cells = [lengths[row.method, task] for task in tasks]
            speed = f"{row.ratio:.2f} [{low:.2f}-{high:.2f}]"
            table.add_row(row.method, *cells, speed, "yes" if row.identical else "NO")
    return table


def rate_table(contestants: Sequence[OwnMethod], requests: Sequence[Request]) -> Table:
    """The acceptance rate at every depth, over all prompts."""
    deepest = max(each.drafter.max_depth for each in contestants)
    table = Table("acceptance rate at depth", *map(str, range(1, deepest + 1)), box=None)
    for each in contestants[1:]:
        found = acceptance(
            each.target,
            each.drafter,
            each.params.drafter,
            [request.ids for request in requests],
            each.sampling,
            each.max_new_tokens,
        )
        table.add_row(each.name, *(f"{rate:.3f}" for rate in found.rates))
    return table


def _run(options: Options) -> None:
    if min(options.limit, options.runs, options.max_new_tokens) < 1 or not options.temperature:
        raise SpecjaxError("limit, runs and max_new_tokens must be at least 1, and a temperature")
    heads = heads_in(options.head, options.target)
    target = load(options.target)
    tokenizer = target.require_tokenizer()
    tasks = read_tasks(options.tasks, options.limit)
    requests = [Request(task.kind, token_ids(task, tokenizer)) for task in tasks]
    longest = max(len(request.ids) for request in requests)
    width = max(Console().width, TABLE_WIDTH)
    console = Console(soft_wrap=True, markup=False, highlight=False, width=width)
    for temperature in options.temperature:
        contestants = contestants_of(target, heads, options, temperature, longest)
        rows = list(compare(contestants, requests, options.runs))
        console.print(speed_table(rows, temperature))
        for row in rows[1 - len(contestants) :]:
            if row.mean_accepted_length == 1.0:
                console.print(f"{row.method}: {advice(row.rounds)}", style="bold red")
        console.print(rate_table(contestants, requests))
    print(f"medians of {options.runs} runs in turn on {jax.devices()[0].device_kind}")


if __name__ == "__main__":
    sys.exit(exit_code(partial(_run, tyro.cli(Options, description=__doc__))))
