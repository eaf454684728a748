"""Measures several drafters on the same prompts in turn, to compare them for tuning."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, zip_longest
from statistics import median
from typing import Any, NamedTuple

from specjax.bench.measure import Sample, TaskPrompt, measure_trials, with_progress
from specjax.decoding.drafter import Drafter
from specjax.decoding.prompt import padded_length
from specjax.decoding.sampling import Sampling
from specjax.loading.targets import LoadedTarget
from specjax.run.distillation import answers_of
from specjax.run.engines import make_engine
from specjax.run.runner import Runner
from specjax.run.tasks import read_tasks, task_prompts

Ids = Sequence[int]  # a prompt in tokens
SamplesByPrompt = list[list[Sample]]  # of a runner: per prompt, its repeats


class Point(NamedTuple):
    """The outcome of one value of a setting over all prompts."""

    value: Any
    accepted_length: float
    tokens_per_second: float  # prefill counts, compiling does not


Report = Callable[[str, str, Sequence[Point]], None]  # called with title, setting and points


@dataclass(frozen=True)
class Workload:
    """The prompts that tuning measures, and how their target continues them."""

    target: LoadedTarget
    prompts: Sequence[Ids]
    max_new_tokens: int
    sampling: Sampling = Sampling()

    @classmethod
    def of_tasks(
        cls, target: LoadedTarget, source: str, limit: int, max_new_tokens: int
    ) -> "Workload":
        """Reads validation tasks, `limit` of each kind; the kinds alternate."""
        tasks = read_tasks(source, limit, is_validation=True)
        prompts = task_prompts(tasks, target, max_new_tokens, answers_of(target, max_new_tokens))
        kinds = [list(of_kind) for _, of_kind in groupby(prompts, lambda prompt: prompt.kind)]
        in_turn = filter(None, chain.from_iterable(zip_longest(*kinds)))
        return cls(target, [prompt.ids for prompt in in_turn], max_new_tokens)

    def runner(self, name: str, drafter: Drafter, params: Any) -> Runner:
        """Returns the runner of a drafter, after compiling everything and running it once."""
        engine = make_engine(self.target, (drafter, params), self.max_new_tokens, self.sampling)
        runner = Runner(name, *engine, padded_length(self.prompts))
        prepared = runner.prepare([self.prompts[0]])
        runner.engine.warm_up(runner.params, *prepared)
        runner.run(prepared)
        return runner

    def sweep(self, candidates: Mapping[Any, tuple[Drafter, Any]]) -> list[Point]:
        """Runs each prompt once with each drafter and its params; returns a point per value."""
        named = with_progress(candidates.items(), "Compiling candidates")
        runners = [self.runner(str(value), *candidate) for value, candidate in named]
        measured = samples_by_prompt(runners, self.prompts)
        pairs = zip(candidates, measured, strict=True)
        return [Point(value, *figures(samples)) for value, samples in pairs]

    def pick(
        self,
        title: str,
        setting: str,
        candidates: Mapping[Any, tuple[Drafter, Any]],
        report: Report,
        tolerance: float = 1.0,
    ) -> Any:
        """Sweeps a setting and reports the points; returns the first value whose accepted length is
        at least `tolerance` times the highest."""
        points = self.sweep(candidates)
        report(title, setting, points)
        enough = tolerance * max(point.accepted_length for point in points)
        return next(point.value for point in points if point.accepted_length >= enough)


def samples_by_prompt(
    runners: Sequence[Runner], prompts: Sequence[Ids], num_runs: int = 1
) -> list[SamplesByPrompt]:
    """Runs all runners on all prompts in turn; returns the samples of each runner."""
    batches = [(TaskPrompt("", tuple(ids)),) for ids in prompts]
    by_prompt: dict[tuple[str, int], list[Sample]] = {}
    for sample in chain.from_iterable(measure_trials(runners, batches, num_runs)):
        by_prompt.setdefault((sample.method, sample.number), []).append(sample)
    numbers = range(len(prompts))
    return [[by_prompt[runner.name, number] for number in numbers] for runner in runners]


def figures(samples: SamplesByPrompt) -> tuple[float, float]:
    """Returns accepted length and tokens per second; of the repeats the median counts."""
    tokens = sum(repeats[0].num_tokens for repeats in samples)
    passes = sum(repeats[0].passes for repeats in samples)
    seconds = sum(
        repeats[0].num_tokens * median(1 / run.speed for run in repeats) for repeats in samples
    )
    return tokens / passes, tokens / seconds
