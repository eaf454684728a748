"""Chooses the method, with its settings, that is fastest for a target on this machine.

Candidates come from the search spaces of the registry. Successive halving: all of them run a few
prompts in turn with plain decoding, the slower half is dropped, the rest gets twice as many
prompts, until one is left. Its break-even is measured, and it is chosen if it beats plain decoding
behind the gate of `auto`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, median
from typing import Any, NamedTuple

import jax

from specjax.bench.measure import PLAIN, with_progress
from specjax.core.errors import SpecjaxError
from specjax.decoding.drafter import Drafter
from specjax.loading.drafters import load_drafter, settings_of
from specjax.loading.method import gated
from specjax.loading.methods import METHODS
from specjax.loading.tuned import AutoChoice, machine_of
from specjax.run.runner import Runner
from specjax.tuning.runs import Run, Workload, in_turn, num_drafting_rounds

FIRST_PROMPTS = 2  # that all candidates run
NUM_TURNS = 3  # runs of a prompt; their median counts
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
    """A method with settings, behind a gate that never shuts."""

    method: str
    settings: Mapping[str, Any]
    drafter: Drafter
    params: Any
    runner: Runner

    @property
    def name(self) -> str:
        """The method and its settings in short."""
        values = [
            f"{name}={f'{len(value)} paths' if isinstance(value, tuple) else value}"
            for name, value in self.settings.items()
        ]
        return f"{self.method} ({', '.join(values)})" if values else self.method


def tune_machine(
    workload: Workload,
    methods: Sequence[str] = (),
    sources: Mapping[str, str] | None = None,
    given: Mapping[str, Mapping[str, Any]] | None = None,
    report: Report = lambda title, results: None,
) -> AutoChoice:
    """Chooses what `auto` does: the fastest method, or plain decoding.

    Args:
        workload: target and validation prompts; prompts of different kinds should alternate.
        methods: the methods to try, besides those of `sources` and `given`; by default all that
            this target and these sources serve.
        sources: by method, the folder or hub id that it reads, if that is not pocket's own.
        given: by method, settings that all its candidates have.
        report: called with what is found.

    Raises:
        SpecjaxError: if one of `methods`, or one with a source or settings, cannot be had.
    """
    sources, given = sources or {}, given or {}
    named = list(dict.fromkeys([*methods, *sources, *given]))
    for method in named:  # fails now rather than after the work
        load_drafter(method, workload.target, sources.get(method), **given.get(method, {}))
        if not METHODS[method].search_space:
            raise SpecjaxError(f"method {method!r} is never behind auto; leave it out")
    wanted = named if methods else [name for name, row in METHODS.items() if row.search_space]
    plain = workload.runner(*load_drafter(PLAIN, workload.target))
    found = _candidates(workload, wanted, sources, given, report)
    candidates = list(with_progress(found, "Compiling candidates"))
    machine = machine_of(workload.target)
    if candidates:
        winner = _halved(candidates, plain, workload, report)
        cost = break_even(winner.runner, plain, workload)
        gate = gated(winner.drafter, winner.params, workload.target, cost)
        final = workload.runner(gate, winner.params)
        runs = _measured([plain, final], workload.prompts)
        result = _result(f"{winner.name}, break-even {cost:.2f}", runs[1], runs[0])
        report("Behind the gate, on all prompts", [result])
        if result.speed > MIN_GAIN:
            settings = settings_of(winner.drafter, winner.method, workload.target)
            about = settings, sources.get(winner.method), cost, (1, gate.num_nodes)
            return AutoChoice(machine, winner.method, *about)
    return AutoChoice(machine, PLAIN, widths=(1,))


def _candidates(
    workload: Workload,
    methods: Sequence[str],
    sources: Mapping[str, str],
    given: Mapping[str, Mapping[str, Any]],
    report: Report,
) -> Iterator[Candidate]:
    """Yields all combinations of settings that this target serves."""
    reasons: list[str] = []
    for method in methods:
        shared: dict[Any, Any] = {}  # params, which all settings of a method share
        fixed = given.get(method, {})
        spaces = [space for space in METHODS[method].search_space if _serves(space, fixed)]
        for space in spaces or ({},):
            searched = {name: values for name, values in space.items() if name not in fixed}
            for values in product(*searched.values()):
                settings = {**dict(zip(searched, values, strict=True)), **fixed}
                asked = method, workload.target, sources.get(method)
                try:
                    drafter, params = load_drafter(*asked, **settings)
                    gate = gated(drafter, params, workload.target, NEVER_SHUTS)
                except SpecjaxError as error:
                    reasons.append(f"{method} is skipped: {error}")
                    continue
                params = shared.setdefault(jax.tree.structure(params), params)
                yield Candidate(method, settings, drafter, params, workload.runner(gate, params))
    for reason in dict.fromkeys(reasons):
        report(reason, ())


def _serves(space: Mapping[str, Sequence], fixed: Mapping[str, Any]) -> bool:
    """Whether a search space is for the kinds among the given settings, such as a length rule."""
    kinds = {name: value for name, value in fixed.items() if isinstance(value, str)}
    return all(value in space.get(name, (value,)) for name, value in kinds.items())


def _halved(
    candidates: Sequence[Candidate], plain: Runner, workload: Workload, report: Report
) -> Candidate:
    """Returns the candidate that is left when the slower half has been dropped time and again."""
    left = list(range(len(candidates)))
    runs: dict[int, list[list[Run]]] = {number: [] for number in left}
    of_plain: list[list[Run]] = []
    num_prompts = FIRST_PROMPTS
    while True:
        prompts = workload.prompts[len(of_plain) : num_prompts]
        found = _measured([plain, *(candidates[number].runner for number in left)], prompts)
        of_plain += found[0]
        for number, own in zip(left, found[1:], strict=True):
            runs[number] += own
        results = {n: _result(candidates[n].name, runs[n], of_plain) for n in left}
        left.sort(key=lambda number: -results[number].speed)
        report(f"On {len(of_plain)} prompts", [results[number] for number in left])
        if len(left) == 1 or len(of_plain) == len(workload.prompts):
            return candidates[left[0]]
        left = left[: (len(left) + 1) // 2]
        num_prompts *= 2


def _measured(runners: Sequence[Runner], prompts: Sequence[Any]) -> list[list[list[Run]]]:
    """Returns the runs of each runner, by prompt and turn."""
    turns = [list(in_turn(runners, prompts, turn)) for turn in range(NUM_TURNS)]
    return [
        [[turn[number][each] for turn in turns] for number in range(len(prompts))]
        for each in range(len(runners))
    ]


def _result(name: str, own: Sequence[Sequence[Run]], plain: Sequence[Sequence[Run]]) -> Result:
    """Compares runs, by prompt and turn, in pairs; every prompt counts the same."""
    relative = [
        median(
            run.seconds_per_token / other.seconds_per_token
            for run, other in zip(runs, others, strict=True)
        )
        for runs, others in zip(own, plain, strict=True)
    ]
    tokens = sum(runs[0].num_tokens for runs in own)
    seconds = sum(runs[0].num_tokens * median(r.seconds_per_token for r in runs) for runs in own)
    rounds = sum(runs[0].num_rounds for runs in own)
    return Result(name, 1 / fmean(relative), tokens / rounds, tokens / seconds)


def break_even(own: Runner, plain: Runner, workload: Workload) -> float:
    """Measures how many accepted tokens make up for the cost of a round that drafts.

    That is what such a round takes beyond a step of plain decoding, in these steps: of all that the
    runs take, prefill aside, what is more than a step per round.
    """
    extra = num_drafting = 0.0
    measured = _measured([plain, own], workload.prompts)
    for ids, steps, runs in zip(workload.prompts, *measured, strict=True):
        pairs = zip(runs, steps, strict=True)
        cost = median(run.decode_seconds / step.decode_seconds for run, step in pairs)
        extra += cost * steps[0].num_rounds - runs[0].num_rounds
        num_drafting += num_drafting_rounds(own, ids)
    return max(0.0, extra / num_drafting) if num_drafting else 0.0
