"""Chooses the fastest method and settings for a target on this machine.

The registry's search spaces define the candidates. Successive halving: all candidates run a few
prompts in turn with plain decoding, the slower half is dropped, and the rest gets twice as many
prompts, until one remains. Its break-even is measured, and it is chosen if it beats plain decoding
behind the gate of `auto`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, median
from typing import Any, NamedTuple

import jax

from specjax.bench.measure import PLAIN, with_progress
from specjax.bench.options import MethodVariant
from specjax.core.errors import SpecjaxError
from specjax.decoding.drafter import Drafter
from specjax.decoding.drafters.auto import Auto
from specjax.loading.drafters import load_drafter
from specjax.loading.method import Request
from specjax.loading.methods import METHODS
from specjax.loading.tuned import AutoChoice, machine_of
from specjax.run.runner import Runner
from specjax.tuning.runs import SamplesByPrompt, Workload, figures, samples_by_prompt

FIRST_PROMPTS = 2  # that all candidates run
NUM_REPEATS = 3  # runs of a prompt; their median counts
MIN_GAIN = 1.02  # over plain decoding; less is noise, and plain is chosen
NEVER_SHUTS = -1.0  # a break-even below any mean


class Result(NamedTuple):
    """The figures of a candidate over several prompts."""

    name: str
    speed: float  # over plain decoding
    accepted_length: float
    tokens_per_second: float


Report = Callable[[str, Sequence[Result]], None]  # called with a title, and results or none


@dataclass(frozen=True)
class Candidate:
    """A method with settings, and its runner behind a gate that never shuts."""

    method: str
    settings: Mapping[str, Any]
    drafter: Drafter
    params: Any
    runner: Runner


def tune_machine(
    workload: Workload,
    variants: Mapping[str, MethodVariant] | None = None,
    only: bool = False,
    report: Report = lambda title, results: None,
) -> AutoChoice:
    """Chooses the method of `auto`: the fastest one, or plain decoding.

    `variants` holds, by method, the source of its drafter and the settings that are not searched;
    with `only`, no other methods are tried. Prompts of different kinds should alternate.
    """
    variants = variants or {}
    for method, (_, source, settings) in variants.items():  # fails now rather than after the work
        load_drafter(method, workload.target, source, **settings)
        if not METHODS[method].search_space:
            raise SpecjaxError(f"method {method!r} cannot be used with auto; remove it")
    if not only:
        searched = {name: MethodVariant(name) for name, row in METHODS.items() if row.search_space}
        variants = {**searched, **variants}
    plain = workload.runner(PLAIN, *load_drafter(PLAIN, workload.target))
    loaded = _candidates(workload, variants, report)
    candidates = list(with_progress(loaded, "Compiling candidates"))
    machine = machine_of(workload.target)
    if candidates:
        winner = _halved(candidates, plain, workload, report)
        cost = break_even(winner.runner, plain, workload)
        gate = Auto(winner.drafter, cost)
        name = f"{winner.runner.name}, break-even {cost:.2f}"
        final = workload.runner(name, gate, winner.params)
        of_plain, of_winner = samples_by_prompt([plain, final], workload.prompts, NUM_REPEATS)
        result = _result(name, of_winner, of_plain)
        report("Behind the gate, on all prompts", [result])
        if result.speed > MIN_GAIN:
            request = Request(METHODS, winner.method, workload.target)
            settings = {**request.tuned(), **winner.settings}
            source = variants[winner.method].source
            return AutoChoice(machine, winner.method, settings, source, cost, (1, gate.num_nodes))
    return AutoChoice(machine, PLAIN, widths=(1,))


def _candidates(
    workload: Workload, variants: Mapping[str, MethodVariant], report: Report
) -> Iterator[Candidate]:
    """Yields all combinations of settings that this target supports."""
    reasons: list[str] = []
    for method, (_, source, fixed) in variants.items():
        shared: dict[Any, Any] = {}  # params, which all settings of a method share
        tried: list[Mapping[str, Any]] = []
        spaces = [space for space in METHODS[method].search_space if _matches(space, fixed)]
        for space in spaces or ({},):
            searched = {name: values for name, values in space.items() if name not in fixed}
            for values in product(*searched.values()):
                settings = {**dict(zip(searched, values, strict=True)), **fixed}
                if settings in tried:  # spaces may differ in fixed settings alone
                    continue
                tried.append(settings)
                try:
                    drafter, params = load_drafter(method, workload.target, source, **settings)
                    gate = Auto(drafter, NEVER_SHUTS)
                    gate.check(workload.target.model, params)
                except SpecjaxError as error:
                    reasons.append(f"{method} is skipped: {error}")
                    continue
                params = shared.setdefault(jax.tree.structure(params), params)
                runner = workload.runner(_name(method, settings), gate, params)
                yield Candidate(method, settings, drafter, params, runner)
    for reason in dict.fromkeys(reasons):
        report(reason, ())


def _name(method: str, settings: Mapping[str, Any]) -> str:
    """Returns the method and its settings in short."""
    values = [
        f"{name}={f'{len(value)} paths' if isinstance(value, tuple) else value}"
        for name, value in settings.items()
    ]
    return f"{method} ({', '.join(values)})" if values else method


def _matches(space: Mapping[str, Sequence], fixed: Mapping[str, Any]) -> bool:
    """Whether a search space allows the fixed settings that select a kind, such as a rule."""
    kinds = {name: value for name, value in fixed.items() if isinstance(value, str)}
    return all(value in space.get(name, (value,)) for name, value in kinds.items())


def _halved(
    candidates: Sequence[Candidate], plain: Runner, workload: Workload, report: Report
) -> Candidate:
    """Returns the last candidate after repeatedly dropping the slower half."""
    remaining = list(range(len(candidates)))
    runs: dict[int, SamplesByPrompt] = {number: [] for number in remaining}
    of_plain: SamplesByPrompt = []
    num_prompts = FIRST_PROMPTS
    while True:
        prompts = workload.prompts[len(of_plain) : num_prompts]
        runners = [plain, *(candidates[number].runner for number in remaining)]
        new_of_plain, *new = samples_by_prompt(runners, prompts, NUM_REPEATS)
        of_plain += new_of_plain
        for number, of_candidate in zip(remaining, new, strict=True):
            runs[number] += of_candidate
        results = {n: _result(candidates[n].runner.name, runs[n], of_plain) for n in remaining}
        remaining.sort(key=lambda number: -results[number].speed)
        report(f"On {len(of_plain)} prompts", [results[number] for number in remaining])
        if len(remaining) == 1 or len(of_plain) == len(workload.prompts):
            return candidates[remaining[0]]
        remaining = remaining[: (len(remaining) + 1) // 2]
        num_prompts *= 2


def _result(name: str, runs: SamplesByPrompt, plain: SamplesByPrompt) -> Result:
    """Compares runs in pairs, by prompt and repeat; all prompts have the same weight."""
    relative = [
        median(other.speed / run.speed for run, other in zip(repeats, others, strict=True))
        for repeats, others in zip(runs, plain, strict=True)
    ]
    return Result(name, 1 / fmean(relative), *figures(runs))


def break_even(runner: Runner, plain: Runner, workload: Workload) -> float:
    """Measures how many accepted tokens make up for the cost of a round that drafts.

    That is the time of such a round beyond a step of plain decoding, in these steps: all that the
    runs take, prefill aside, beyond a step per round.
    """
    extra = num_drafting = 0.0
    measured = samples_by_prompt([plain, runner], workload.prompts, NUM_REPEATS)
    for ids, steps, runs in zip(workload.prompts, *measured, strict=True):
        pairs = zip(runs, steps, strict=True)
        cost = median(run.decode_seconds / step.decode_seconds for run, step in pairs)
        extra += cost * steps[0].passes - runs[0].passes
        num_drafting += runner.num_drafting_rounds(runner.prepare([ids], runs[0].trial))
    return max(0.0, extra / num_drafting) if num_drafting else 0.0
