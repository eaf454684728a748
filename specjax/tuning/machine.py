"""Which method, with which settings, is the fastest for a target on this device.

First the target's passes are timed by their rows (`costs`). Then one run of every family of
settings (`candidates`) tells how it drafts and what that costs (`observation`), and so what all of
its members would do (`prediction`, `search`). The best few then run in turn with plain decoding on
more prompts, and that alone decides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from specjax.bench.measure import PLAIN, Sample, batches_of, measure, warm_up
from specjax.decoding.drafters.auto import Gated
from specjax.hub import POCKET
from specjax.loading import whole_settings
from specjax.methods import METHODS
from specjax.models.pass_costs import RowCosts, machine_of
from specjax.tuning.candidates import Family, families
from specjax.tuning.costs import WIDTHS, measure_row_costs
from specjax.tuning.prediction import Candidate, finalists
from specjax.tuning.search import Outcome, Search
from specjax.tuning.serving import Serving

AUTO = "auto"  # the method that uses what is found here
LEAST_SPEED = 0.85  # of plain's, predicted; slower ones do not run again
MOST_FINALISTS = 8
NUM_RUNS = 3
LEAST_GAIN = 1.02  # over plain decoding; less is noise, and plain is chosen


class Result(NamedTuple):
    """What a finalist did beside plain decoding."""

    candidate: Candidate
    speed: float  # over plain, on all the texts together
    quartiles: tuple[float, float]  # of the pairs of runs
    tokens_per_second: float
    accepted_length: float


@dataclass(frozen=True)
class Report:
    """Told of what is found, as it comes."""

    costs: Callable[[RowCosts], None] = lambda costs: None
    family: Callable[[Family, Outcome], None] = lambda family, outcome: None
    finalists: Callable[[Sequence[Candidate]], None] = lambda candidates: None
    results: Callable[[Sequence[Result]], None] = lambda results: None


def tune_machine(
    serving: Serving, methods: Sequence[str] = (), report: Report = Report()
) -> dict[str, Any]:
    """The settings of `auto`: those of the fastest method, or of plain decoding.

    Args:
        serving: target and validation prompts.
        methods: that are tried; by default all that this target and these sources serve.
        report: told of what is found.

    Raises:
        SpecjaxError: if one of `methods`, or one with a source, cannot be had.
    """
    named = list(dict.fromkeys([*methods, *serving.sources]))
    for method in named:
        serving.load(method, {})  # fails now rather than after the work
    slots = serving.padded_length + serving.max_new_tokens + WIDTHS[-1]
    row_costs = measure_row_costs(serving.target, serving.text_length, slots)
    report.costs(row_costs)
    search = Search(serving, row_costs, report.family)
    candidates = search.run(families(named if methods else methods_of(serving)))
    chosen = finalists(candidates, LEAST_SPEED, MOST_FINALISTS)
    report.finalists(chosen)
    results = run_finalists(serving, chosen) if chosen else []
    report.results(results)
    return settings_of(best_of(results), serving, row_costs)


def methods_of(serving: Serving) -> list[str]:
    """All methods that serve this target, plain decoding aside."""
    has_parts = serving.target.name == POCKET
    return [
        name
        for name, row in METHODS.items()
        if name not in (PLAIN, AUTO)
        and (has_parts or name in serving.sources or not row.has_params)
    ]


def run_finalists(serving: Serving, candidates: Sequence[Candidate]) -> list[Result]:
    """Runs them and plain decoding in turn on all prompts, as `auto` would run them."""
    contestants = [serving.plain()]
    for number, each in enumerate(candidates):
        drafter, params = serving.load(each.method, each.settings)
        gated = Gated(drafter, each.row_widths, each.costs, each.expected, each.asked_cost)
        contestants.append(serving.contestant(str(number), gated, params))
    batches = batches_of(serving.requests)
    warm_up(contestants, batches[0])
    samples = list(measure(contestants, batches, NUM_RUNS))
    return [result_of(each, str(number), samples) for number, each in enumerate(candidates)]


def result_of(candidate: Candidate, name: str, samples: Sequence[Sample]) -> Result:
    """What the runs of `name` say.

    The speed of a prompt is the median over its pairs of runs; prompts count by the time that
    plain decoding takes for them, so that it is the speed on all texts together.
    """
    plain: dict[int, dict[int, Sample]] = {}
    own: dict[int, dict[int, Sample]] = {}
    for sample in samples:
        if sample.method in (PLAIN, name):
            runs = plain if sample.method == PLAIN else own
            runs.setdefault(sample.number, {})[sample.repeat] = sample
    ratios = {
        number: [_speed(run) / _speed(plain[number][repeat]) for repeat, run in runs.items()]
        for number, runs in own.items()
    }
    weights = {number: median(run.seconds for run in plain[number].values()) for number in ratios}
    seconds = sum(weights[number] / median(pairs) for number, pairs in ratios.items())
    pairs = [ratio for each in ratios.values() for ratio in each]
    low, high = (float(value) for value in np.percentile(pairs, (25, 75)))
    texts = [text for runs in own.values() for run in runs.values() for text in run.texts]
    tokens = sum(run.num_tokens for runs in own.values() for run in list(runs.values())[:1])
    return Result(
        candidate=candidate,
        speed=sum(weights.values()) / seconds,
        quartiles=(low, high),
        tokens_per_second=tokens / seconds,
        accepted_length=sum(len(text.tokens) for text in texts)
        / max(1, sum(text.rounds for text in texts)),
    )


def _speed(sample: Sample) -> float:
    return sample.num_tokens / sample.seconds


def best_of(results: Sequence[Result]) -> Candidate | None:
    """The fastest; None if none is faster than plain decoding by more than noise."""
    best = max(results, key=lambda result: result.speed, default=None)
    return best.candidate if best is not None and best.speed > LEAST_GAIN else None


def settings_of(chosen: Candidate | None, serving: Serving, row_costs: RowCosts) -> dict[str, Any]:
    """The settings of `auto`; those of plain decoding if nothing is chosen.

    They are whole, also where the method has tuned settings of its own, which may change.
    """
    if chosen is None:
        chosen = Candidate(PLAIN, {}, None, 1, 1.0, 0.0, (1,), (1.0,), 1.0, 1.0)
    method, source = chosen.method, chosen.source
    return {
        "device": machine_of(serving.target.params),
        "method": method,
        "settings": whole_settings(method, serving.target, source, chosen.settings),
        "source": source,
        "row_widths": chosen.row_widths,
        "costs": chosen.costs,
        "expected": chosen.expected,
        "asked_cost": chosen.asked_cost,
        "row_costs": {"widths": row_costs.widths, "costs": row_costs.costs},
    }
