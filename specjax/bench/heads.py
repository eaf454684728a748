"""What heads are worth: `python -m specjax.bench.heads --head NAME=METHOD:FOLDER ...`.

Measures all heads in turn on the same prompts, each with the method that is named for it (by
default `eagle2` for an EAGLE head, and the one that it was trained for), and tells the acceptance
rate at every depth (HASS, figure 5). If the first drafts as `eagle2` or `hass`, then also that head
behind EAGLE's static tree, and above temperature 0 behind the published tree that does not see the
noise.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import tyro
from rich.console import Console
from rich.table import Table
from tyro.conf import UseAppendAction

from specjax.bench.acceptance import USELESS, acceptance, advice
from specjax.bench.contestants import OwnMethod
from specjax.bench.measure import PLAIN, Request
from specjax.bench.run import compare
from specjax.bench.summary import ALL, Measurement
from specjax.tasks import read_tasks, token_ids
from specjax.core.errors import SpecjaxError, exit_code
from specjax.core.files import expand_user
from specjax.decoding.drafter import Params
from specjax.decoding.drafters._trees import TreeSettings
from specjax.decoding.drafters.eagle2 import Eagle2Settings
from specjax.decoding.prompt import padded_length
from specjax.decoding.sampling import Sampling
from specjax.hub import POCKET, LoadedTarget, load
from specjax.loading import find_head, load_drafter
from specjax.methods import METHODS
from specjax.models.heads.kinds import KINDS
from specjax.models.io.head_files import detect_format, read_about

TABLE_WIDTH = 150  # even where a terminal is narrower: no number is cut off
STATIC, BLIND = "{} (static tree)", "{} (tree blind to the noise)"
DYNAMIC = "{} (dynamic tree)"


@dataclass(frozen=True)
class Options:
    """What are heads worth?"""

    target: str = POCKET
    """The model: pocket, a folder in Hugging Face format, or a hub id."""
    head: UseAppendAction[tuple[str, ...]] = ()
    """A head as NAME=FOLDER or NAME=METHOD:FOLDER: the run folder of `specjax train`, or a head as
    published. NAME=METHOD is pocket's own head of that method. May be given several times; by
    default pocket's EAGLE and HASS heads."""
    tasks: str = POCKET
    """pocket for edits and completions of its held-out code, or a JSONL file."""
    limit: int = 4
    """Prompts of each kind of task."""
    max_new_tokens: int = 128
    """Stop after so many new tokens, if the text has not ended before."""
    top_k: int = 10
    """Of eagle2's and hass's tree, as are the next two."""
    depth: int = 6
    """Tokens of its longest path."""
    num_tokens: int = 60
    """Its nodes, root included; every node is a row of the target's pass."""
    dynamic: bool = False
    """Also measure the heads of Medusa and ParallelSpec behind a dynamic tree of so many nodes."""
    temperature: tuple[float, ...] = (0.0, 1.0)
    """One table for each."""
    runs: int = 3
    """How often each method runs each prompt."""


class HeadSource(NamedTuple):
    """A head and how it drafts."""

    method: str
    folder: str | None  # None is pocket's own
    settings: Mapping[str, Any] = MappingProxyType({})


def contestants_of(
    target: LoadedTarget,
    heads: dict[str, HeadSource],
    options: Options,
    temperature: float,
    requests: Sequence[Request],
) -> list[OwnMethod]:
    """Plain decoding, the static tree of the first head if it is EAGLE's, and every head.

    Raises:
        SpecjaxError: for a head that is missing or does not fit.
    """
    tree = {name: getattr(options, name) for name in ("top_k", "depth", "num_tokens")}
    first, head = next(iter(heads.items()))
    asked = {PLAIN: HeadSource(PLAIN, None)}
    is_grown = METHODS[head.method].drafter is Eagle2Settings
    if is_grown:
        asked[STATIC.format(first)] = HeadSource("eagle", head.folder)
    for name, each in heads.items():
        grows = METHODS[each.method].drafter is Eagle2Settings
        asked[name] = each._replace(settings=tree) if grows else each
        if options.dynamic and issubclass(METHODS[each.method].drafter, TreeSettings):
            settings = {"tree": "dynamic", "num_tokens": options.num_tokens}
            asked[DYNAMIC.format(name)] = each._replace(settings=settings)
    if is_grown and temperature > 0:
        asked[BLIND.format(first)] = head._replace(settings={**tree, "noise_share": 0.0})
    made = []
    for name, each in asked.items():
        drafter, params = load_drafter(each.method, target, each.folder, **each.settings)
        made.append(
            OwnMethod(
                name=name,
                target=target,
                drafter=drafter,
                params=Params(target.params, params),
                sampling=Sampling(temperature),
                max_new_tokens=options.max_new_tokens,
                padded_length=padded_length([request.ids for request in requests]),
            )
        )
    return made


def heads_in(assignments: Sequence[str], target: str) -> dict[str, HeadSource]:
    """Name -> head, from texts of the form NAME=FOLDER, NAME=METHOD:FOLDER or NAME=METHOD.

    Raises:
        SpecjaxError: for a text of another form, no head for a target that has none, or a folder
            that is no head.
    """
    if not assignments and target != POCKET:
        raise SpecjaxError("no heads are given; add --head NAME=FOLDER")
    found: dict[str, HeadSource] = {}
    for assignment in assignments:
        name, equals, told = assignment.partition("=")
        if not (name and equals and told):
            raise SpecjaxError(f"--head {assignment!r} is not NAME=FOLDER; write hass=runs/hass")
        if name in found:
            raise SpecjaxError(f"--head names {name} twice; give each a name of its own")
        if name in (PLAIN, ALL):
            raise SpecjaxError(f"--head {assignment!r}: {name} names something else; rename it")
        found[name] = source_of(assignment, told)
    return found or {name: HeadSource(name, None) for name in ("eagle2", "hass")}


def source_of(assignment: str, told: str) -> HeadSource:
    """What stands behind NAME= in `assignment`.

    Raises:
        SpecjaxError: if a method lacks its folder, or the folder is no head.
    """
    method, colon, folder = told.partition(":")
    is_method = method in METHODS and METHODS[method].head != ""
    if colon and is_method:
        if not folder:
            raise SpecjaxError(f"--head {assignment!r} names no folder; write NAME={method}:FOLDER")
        return HeadSource(method, folder)
    if is_method and not expand_user(told).exists():
        return HeadSource(method, None)
    return HeadSource(method_of(told), told)


def method_of(source: str) -> str:
    """The method that a head was trained for; `eagle2` for EAGLE's and HASS's.

    Raises:
        SpecjaxError: if there is no such head, or it does not tell.
    """
    folder = find_head(source)
    kind = detect_format(folder, KINDS.values()).kind
    if kind == "eagle":
        return "eagle2"
    method = read_about(folder).get("method", kind)
    if method not in METHODS:
        raise SpecjaxError(f"{source} does not tell its method; write NAME=METHOD:{source}")
    return method


def speed_table(rows: Sequence[Measurement], temperature: float) -> Table:
    """Accepted length and speed by task, then over all (ParallelSpec, table 1)."""
    tasks = list(dict.fromkeys(row.task for row in rows))
    lengths = {
        (row.method, row.task): f"{row.mean_accepted_length:.2f} ({row.ratio:.2f}x)" for row in rows
    }
    title = f"T={temperature:g}: accepted length (x plain)"
    table = Table(title, *tasks, "quartiles", "same", box=None)
    for row in rows:
        if row.task == tasks[-1]:
            low, high = row.ratio_quartiles
            cells = [lengths[row.method, task] for task in tasks]
            table.add_row(
                row.method, *cells, f"{low:.2f}-{high:.2f}", "yes" if row.identical else "NO"
            )
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
    width = max(Console().width, TABLE_WIDTH)
    console = Console(soft_wrap=True, markup=False, highlight=False, width=width)
    for temperature in options.temperature:
        contestants = contestants_of(target, heads, options, temperature, requests)
        rows = compare(contestants, requests, options.runs)
        console.print(speed_table(rows, temperature))
        for row in rows[1 - len(contestants) :]:
            if row.mean_accepted_length < USELESS:
                told = advice(row.mean_accepted_length, row.rounds)
                console.print(f"{row.method}: {told}", style="bold red")
        console.print(rate_table(contestants, requests))
    print(f"medians of {options.runs} runs in turn on {jax.devices()[0].device_kind}")


if __name__ == "__main__":
    sys.exit(exit_code(partial(_run, tyro.cli(Options, description=__doc__))))
