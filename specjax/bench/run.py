"""`specjax bench`: measures methods on tasks and tells what they gain over plain decoding."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import jax

from specjax.bench.about import about
from specjax.bench.bandwidth import bytes_per_pass, read_bandwidth
from specjax.bench.contestants import OwnMethod, make_contestants
from specjax.bench.measure import Contestant, Request, batches_of, measure, warm_up
from specjax.bench.options import (
    ALL_METHODS,
    BenchOptions,
    batches_in,
    names_in,
    sampling_of,
    sources_in,
    temperatures_in,
)
from specjax.bench.peers import check_peer
from specjax.bench.progress import watched
from specjax.bench.report import show
from specjax.bench.requests import requests_of
from specjax.bench.results import Results, Stage, make_folder, open_results
from specjax.bench.rounds import told, trace
from specjax.bench.summary import Judge, Measurement, exactly, summarise, whole
from specjax.bench.tasks import read_tasks
from specjax.bench.texts import texts_of
from specjax.bench.ties import NearTies
from specjax.core.errors import SpecjaxError
from specjax.hub import LoadedTarget
from specjax.methods import METHODS, check_settings
from specjax.training.distillation import answers_of

NUM_DRAWN = 5  # rounds of a method that a report draws over time


def run_bench(load_target: Callable[[], LoadedTarget], options: BenchOptions) -> list[Measurement]:
    """Measures, prints a table per temperature and size of batch, and returns all their rows.

    When it is interrupted, what is complete is shown and kept; the same options and folder go on
    from there.

    Args:
        load_target: calls `specjax.load`, once all that needs no target has been checked.
        options: what to measure.

    Raises:
        SpecjaxError: before anything is measured, for options, tasks or methods that cannot be
            served.
    """
    check(options)
    with ExitStack() as stack:
        if options.out is None:
            folder = Path(stack.enter_context(TemporaryDirectory()))
        else:
            folder = make_folder(options.out)
        tasks = read_tasks(options.tasks, options.limit, options.seed)
        target = load_target()
        answer = answers_of(target, options.max_new_tokens)
        requests = requests_of(tasks, target, options.max_new_tokens, answer)
        results = open_results(folder, about(target, options, requests))
        bench = Bench(target, options, requests, results)
        rows = []
        try:
            for stage in bench.stages:
                bench.measure(stage)
                jax.clear_caches()  # a process may hold only so many compiled programs
        finally:
            rows = bench.conclude()
        if options.trace:
            bench.trace()
    return rows


def check(options: BenchOptions) -> None:
    """Raises SpecjaxError for what cannot be served whatever the target is."""
    for name in ("runs", "limit", "max_new_tokens"):
        if getattr(options, name) < 1:
            raise SpecjaxError(
                f"{name} {getattr(options, name)} must be at least 1: nothing would be measured"
            )
    temperatures = temperatures_in(options.temperature)
    for temperature in temperatures:
        sampling_of(options, temperature)
    batches_in(options.batch)
    for name in names_in(options.methods):
        if name != ALL_METHODS:
            check_settings(name, {})
    if options.peers and 0 not in temperatures:
        raise SpecjaxError(
            "peers draw with noise of their own, so texts differ; use temperature 0 with peers"
        )
    for name in names_in(options.peers):
        check_peer(name)
    if options.trace and options.out is None:
        raise SpecjaxError("--trace keeps its figures in a folder; name one with --out")
    sources_in(options.drafter)


@dataclass(frozen=True)
class Bench:
    """One benchmark; its stages share target, prompts and options."""

    target: LoadedTarget
    options: BenchOptions
    requests: Sequence[Request]
    results: Results

    @property
    def stages(self) -> list[Stage]:
        """Every temperature with every size of batch."""
        return [
            Stage(temperature, num_rows)
            for temperature in temperatures_in(self.options.temperature)
            for num_rows in batches_in(self.options.batch)
        ]

    def measure(self, stage: Stage) -> None:
        """Runs what is not among the results yet, and adds it to them."""
        batches = batches_of(self.requests, stage.num_rows)
        contestants = make_contestants(self.target, self.options, self.requests, stage)
        self.results.drop_partial_turns(stage, [each.name for each in contestants])
        samples = self.results.samples(stage, batches)
        seen = {(each.method, each.number, each.repeat) for each in samples}
        total = len(contestants) * len(batches) * self.options.runs
        if len(seen) == total:
            return
        title = f"T={stage.temperature:g}, batch {stage.num_rows}"
        known = self.results.programs(stage)
        for contestant in watched(contestants, f"{title}: compiling", len(contestants)):
            fresh = warm_up([contestant], batches[0])
            if contestant.name not in known:
                self.results.add_programs(stage, fresh)
        fresh = measure(
            contestants,
            batches,
            self.options.runs,
            lambda *run: run in seen,
            lambda: self.results.add_bandwidth(stage, read_bandwidth()),
        )
        for sample in watched(fresh, f"{title}: measuring", total - len(seen)):
            self.results.add_sample(stage, sample)

    def conclude(self) -> list[Measurement]:
        """Shows and keeps the rows and texts of all turns that are complete."""
        rows, texts = [], []
        tokenizer = self.target.require_tokenizer()
        found, num_missing = {}, 0
        for stage in self.stages:
            batches = batches_of(self.requests, stage.num_rows)
            samples = self.results.samples(stage, batches)
            found[stage] = whole(samples, self.results.programs(stage))
            num_turns = len({sample.turn for sample in found[stage]})
            num_missing += len(batches) * self.options.runs - num_turns
        for stage, samples in found.items():
            if not samples:
                continue
            programs = self.results.programs(stage)
            bandwidth = self.results.bandwidth(stage)
            sampling = sampling_of(self.options, stage.temperature)
            options = self.options
            judge = NearTies(self.target, sampling, options.seed, options.max_new_tokens)
            of_stage = [
                replace(
                    with_bandwidth_share(row, self.target, bandwidth),
                    num_missing=num_missing,
                )
                for row in summarise(samples, programs, judge, stage.temperature)
            ]
            show(of_stage, options.runs, bandwidth, sampling)
            rows += of_stage
            texts += texts_of(stage, samples, tokenizer)
        if rows:
            self.results.write_rows(rows)
            self.results.write_texts(texts)
        return rows

    def trace(self) -> None:
        """Times the parts of our methods' rounds at the first temperature, on two prompts."""
        if self.results.has_traces:
            return
        stage = Stage(self.stages[0].temperature, 1)
        without_peers = replace(self.options, peers="")
        made = make_contestants(self.target, without_peers, self.requests, stage)
        own = [each for each in made if isinstance(each, OwnMethod)]
        prompts = [self.requests[0].ids, self.requests[-1].ids]
        traces = trace(own, prompts, watched)
        self.results.write_traces({"temperature": stage.temperature, **told(traces, NUM_DRAWN)})


def compare(
    contestants: Sequence[Contestant],
    requests: Sequence[Request],
    num_runs: int,
    judge: Judge = exactly,
    num_rows: int = 1,
) -> list[Measurement]:
    """The rows of a benchmark at one temperature, kept nowhere.

    Requests of one kind stand together, and plain decoding is among the contestants.
    """
    batches = batches_of(requests, num_rows)
    programs = warm_up(contestants, batches[0])
    return summarise(list(measure(contestants, batches, num_runs)), programs, judge)


def with_bandwidth_share(
    row: Measurement, target: LoadedTarget, bandwidth: float | None
) -> Measurement:
    """The row with the share of `bandwidth`, bytes per second, that its rounds must read."""
    # A peer has weights of its own, and may run elsewhere.
    if bandwidth is None or row.method not in METHODS or row.decode_seconds is None:
        return row
    num_bytes = bytes_per_pass(target, row.mean_length, row.batch) * row.passes
    return replace(row, bandwidth_share=num_bytes / row.decode_seconds / bandwidth)
