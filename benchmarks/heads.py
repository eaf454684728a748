"""Compares heads: python -m benchmarks.heads --head NAME=METHOD:FOLDER ...

All heads run in turn on the same prompts, each with the method that is named for it (by default
`eagle2` for an EAGLE head, else the method it was trained for). If the first drafts as `eagle2` or
`hass`, that head also runs behind EAGLE's static tree, and above temperature 0 behind the published
tree that does not see the noise. The last table has the acceptance rate by depth (HASS, figure 5).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.comparison import compare_in_turn
from benchmarks.harness import TARGET, TASKS, at_least_1, device, main, option, requests_for, table
from specjax import Sampling, load, load_drafter
from specjax.bench.checks import complaints
from specjax.bench.contestants import OwnMethod
from specjax.bench.measure import PLAIN
from specjax.bench.options import settings_in
from specjax.bench.report.tables import depth_table
from specjax.bench.summary import ALL, Measurement, last_task_rows
from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user
from specjax.decoding.drafters.eagle2 import Eagle2
from specjax.hub import POCKET, LoadedTarget
from specjax.loading import find_head
from specjax.methods import METHODS
from specjax.models.io.head_files import read_about
from specjax.tasks import Request

STATIC, BLIND = "{} (static tree)", "{} (tree blind to the noise)"
DYNAMIC = "{} (dynamic tree)"


@dataclass(frozen=True)
class HeadOptions:
    """The options of this benchmark."""

    target: str = option(TARGET, POCKET)
    head: tuple[str, ...] = option(
        "heads as NAME=FOLDER or NAME=METHOD:FOLDER (the run of `specjax train`, or a published "
        "head), or NAME=METHOD for pocket's own; by default pocket's EAGLE and HASS heads",
        (),
    )
    tasks: str = option(TASKS, POCKET)
    limit: int = option("prompts of each kind of task", 4)
    max_new_tokens: int = option("new tokens per prompt at most", 128)
    top_k: int = option("of eagle2's and hass's tree, as are the next two", 10)
    depth: int = option("tokens of its longest path", 6)
    num_tokens: int = option("its nodes, root included", 60)
    set: tuple[str, ...] = option("a setting of one head, as NAME.SETTING=VALUE", ())
    dynamic: bool = option("also run Medusa's and ParallelSpec's heads in a dynamic tree", False)
    temperature: tuple[float, ...] = option("one table for each", (0.0, 1.0), float)
    runs: int = option("how often each method runs each prompt", 3)


class HeadSource(NamedTuple):
    """A head and how it drafts."""

    method: str
    folder: str | None  # None is pocket's own
    settings: Mapping[str, Any] = MappingProxyType({})


def contestants_of(
    target: LoadedTarget,
    heads: Mapping[str, HeadSource],
    options: HeadOptions,
    temperature: float,
    requests: Sequence[Request],
) -> list[OwnMethod]:
    """Makes plain decoding, the variants of the first head if it is EAGLE's, and every head.

    Raises:
        SpecjaxError: for a head that is missing or does not fit.
    """
    tree = {name: getattr(options, name) for name in ("top_k", "depth", "num_tokens")}
    given = settings_in(options.set, {name: each.method for name, each in heads.items()})
    first, head = next(iter(heads.items()))
    asked = {PLAIN: HeadSource(PLAIN, None)}
    is_grown = METHODS[head.method].drafter is Eagle2
    if is_grown:
        asked[STATIC.format(first)] = HeadSource("eagle", head.folder)
    for name, each in heads.items():
        shared = tree if METHODS[each.method].drafter is Eagle2 else each.settings
        asked[name] = each._replace(settings={**shared, **given.get(name, {})})
        if options.dynamic and "tree" in METHODS[each.method].settings:
            settings = {"tree": "dynamic", "num_tokens": options.num_tokens}
            asked[DYNAMIC.format(name)] = each._replace(settings=settings)
    if is_grown and temperature > 0:
        asked[BLIND.format(first)] = head._replace(
            settings={**asked[first].settings, "noise_share": 0.0}
        )
    shared = [each.ids for each in requests], options.max_new_tokens, Sampling(temperature)
    made = []
    for name, each in asked.items():
        loaded = load_drafter(each.method, target, each.folder, **each.settings)
        made.append(OwnMethod.for_prompts(name, target, *loaded, *shared))
    return made


def heads_in(assignments: Sequence[str], target: str) -> dict[str, HeadSource]:
    """Reads texts of the form NAME=FOLDER, NAME=METHOD:FOLDER or NAME=METHOD.

    Raises:
        SpecjaxError: for a text of another form, no head for a target that has none, or a folder
            that is no head.
    """
    if not assignments and target != POCKET:
        raise SpecjaxError("no heads are given; add --head NAME=FOLDER")
    found: dict[str, HeadSource] = {}
    for assignment in assignments:
        name, equals, source = assignment.partition("=")
        if not (name and equals and source):
            raise SpecjaxError(f"--head {assignment!r} is not NAME=FOLDER; write hass=runs/hass")
        if name in found:
            raise SpecjaxError(f"--head names {name} twice; give each a name of its own")
        if name in (PLAIN, ALL):
            raise SpecjaxError(f"--head {assignment!r}: {name} names something else; rename it")
        found[name] = source_of(assignment, source)
    return found or {name: HeadSource(name, None) for name in ("eagle2", "hass")}


def source_of(assignment: str, source: str) -> HeadSource:
    """Reads what follows NAME= in `assignment`.

    Raises:
        SpecjaxError: if a method lacks its folder, or the folder is no head.
    """
    method, colon, folder = source.partition(":")
    is_method = method in METHODS and METHODS[method].head is not None
    if colon and is_method:
        if not folder:
            raise SpecjaxError(f"--head {assignment!r} names no folder; write NAME={method}:FOLDER")
        return HeadSource(method, folder)
    if is_method and not expand_user(source).exists():
        return HeadSource(method, None)
    trained_for = read_about(find_head(source)).get("method", "")
    method = "eagle2" if trained_for in ("", "eagle", "hass") else trained_for
    if method not in METHODS:
        raise SpecjaxError(f"{source} does not name its method; write NAME=METHOD:{source}")
    return HeadSource(method, source)


def speed_table(rows: Sequence[Measurement]) -> str:
    """Formats accepted length and speed by task, then over all (ParallelSpec, table 1)."""
    tasks = list(dict.fromkeys(row.task for row in rows))
    cells = {
        (row.method, row.task): f"{row.mean_accepted_length:.2f} ({row.ratio:.2f}x)" for row in rows
    }
    lines = [
        (
            row.method,
            *(cells[row.method, task] for task in tasks),
            "{:.2f}-{:.2f}".format(*row.ratio_quartiles),
            "yes" if row.identical else "NO",
        )
        for row in last_task_rows(rows)
    ]
    return table(("accepted length (x plain)", *tasks, "quartiles", "same"), lines)


def show(rows: Sequence[Measurement], temperature: float) -> None:
    """Prints the tables, and what makes figures worthless."""
    rates = depth_table(last_task_rows(rows))
    title, depths = f"T={temperature:g}", ("acceptance rate at depth", *rates.header[1:])
    print(f"\n{title}\n", speed_table(rows), "", table(depths, rates.rows), sep="\n")
    print(*complaints(rows), sep="\n")


def run(options: HeadOptions) -> None:
    """Measures and prints the tables."""
    at_least_1(options, "limit", "runs", "max_new_tokens")
    if not options.temperature:
        raise SpecjaxError("no temperature is given; write --temperature 0")
    heads = heads_in(options.head, options.target)
    target = load(options.target)
    requests = requests_for(target, options.tasks, options.limit, options.max_new_tokens)
    for temperature in options.temperature:
        contestants = contestants_of(target, heads, options, temperature, requests)
        show(compare_in_turn(contestants, requests, options.runs), temperature)
    print(f"medians of {options.runs} runs in turn on {device()}")


if __name__ == "__main__":
    main(run, HeadOptions, __doc__)
