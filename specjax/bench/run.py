"""Runs a benchmark: measures methods on tasks and sums up what they gain over plain decoding."""

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax

from specjax.bench.bandwidth import read_bandwidth, with_bandwidth_share
from specjax.bench.contestants import make_contestants
from specjax.bench.measure import (
    Contestant,
    Request,
    Sample,
    batches_of,
    measure_trials,
    warm_up,
    with_progress,
)
from specjax.bench.options import (
    BenchOptions,
    batches_in,
    names_in,
    sampling_of,
    settings_in,
    sources_in,
    temperatures_in,
    variants_in,
)
from specjax.bench.report.terminal import show
from specjax.bench.results import Results, Stage, make_folder, open_results
from specjax.bench.rounds import trace, trace_values
from specjax.bench.summary import Measurement, summarise
from specjax.bench.ties import NearTies
from specjax.core.chat import read_template, with_template
from specjax.core.companions import companion
from specjax.core.errors import SpecjaxError, check_at_least
from specjax.core.folder import RunFolder
from specjax.core.provenance import command_line, machine, revision, versions
from specjax.core.text import token_texts
from specjax.loading.targets import LoadedTarget
from specjax.models.fingerprint import fingerprint
from specjax.run.distillation import answers_of
from specjax.run.runner import Runner
from specjax.run.tasks import count_cut, read_tasks, requests_of

MakeContestants = Callable[[LoadedTarget, BenchOptions, Sequence[Request], Stage], list[Contestant]]
NUM_DRAWN = 5  # rounds of a method that a report draws over time
LONGEST_PROMPT = 600  # characters of a prompt's end that are kept


def run_bench(
    load_target: Callable[[], LoadedTarget],
    options: BenchOptions,
    make: MakeContestants = make_contestants,
) -> list[Measurement]:
    """Measures, prints a table per temperature and batch size, and returns all rows.

    When it is interrupted, complete turns are shown and kept; the same options and folder resume.

    Args:
        load_target: calls `specjax.load`, once all that needs no target has been checked.
        options: what to measure.
        make: makes the contestants, plain decoding first.

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
            stack.enter_context(RunFolder(folder).lock())
        tasks = read_tasks(options.tasks, options.limit, options.seed)
        if options.system is not None:
            tasks = [replace(task, system=options.system) for task in tasks]
        target = load_target()
        if options.chat_template is not None:
            tokenizer = with_template(target.require_tokenizer(), options.chat_template)
            target = replace(target, tokenizer=tokenizer)
        answer = answers_of(target, options.max_new_tokens)
        requests = requests_of(tasks, target, options.max_new_tokens, answer)
        num_turns = sum(len(task.turns) for task in tasks)
        results = open_results(folder, about(target, options, requests, num_turns))
        benchmark = Benchmark(target, options, requests, results, make)
        rows = []
        try:
            for stage in benchmark.stages:
                benchmark.measure(stage)
                jax.clear_caches()  # a process may hold only so many compiled programs
        finally:
            rows = benchmark.conclude()
        if options.trace:
            benchmark.trace()
    return rows


def check(options: BenchOptions) -> None:
    """Raises SpecjaxError for options that cannot be served, whatever the target is."""
    for name in ("runs", "limit", "max_new_tokens"):
        check_at_least(name, getattr(options, name), 1, "nothing would be measured")
    temperatures = temperatures_in(options.temperature)
    for temperature in temperatures:
        sampling_of(options, temperature)
    batches = batches_in(options.batch)
    if options.chat_template is not None:
        read_template(options.chat_template)
    named = variants_in(options.methods)
    if options.peers and 0 not in temperatures:
        raise SpecjaxError(
            "peers draw with noise of their own, so texts differ; use temperature 0 with peers"
        )
    for name in names_in(options.peers):
        companion("peers").check_peer(name, batches)
    if options.trace and options.out is None:
        raise SpecjaxError("--trace keeps its figures in a folder; name one with --out")
    sources_in(options.drafter, named)
    settings_in(options.set, named)


def about(
    target: LoadedTarget, options: BenchOptions, requests: Sequence[Request], num_turns: int
) -> dict[str, Any]:
    """Describes a benchmark: target, device, prompts, methods, settings, versions, command.

    It is resumed only if all of this but the command is the same. Of `num_turns` that the tasks
    have, `requests` are those that fit the target.

    Raises:
        SpecjaxError: for a method or peer that this target cannot have, or that does not fit in
            memory.
    """
    for name in names_in(options.peers):
        companion("peers").PEERS[name].check(target)
    stage = Stage(temperatures_in(options.temperature)[0], 1)
    own = _own_methods(target, options, requests, stage)
    _check_memory(own, requests, max(batches_in(options.batch)))
    prompts = json.dumps([(request.kind, request.ids) for request in requests])
    return {
        "target": target.name,
        "fingerprint": fingerprint(target.config, target.params),
        "dtype": target.dtype_name,
        "padded_width": target.model.padded_width,
        "device": jax.devices()[0].device_kind,
        "machine": machine(),
        "tasks": options.tasks,
        "num_prompts": len(requests),
        "num_left_out": num_turns - len(requests) or None,
        "num_cut": count_cut(requests, target.config, options.max_new_tokens) or None,
        "prompts": f"{zlib.crc32(prompts.encode()):08x}",
        "padded_length": own[0].padded_length,
        "methods": {each.name: each.settings for each in own},
        "peers": options.peers,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "batch": options.batch,
        "verification": options.verification,
        "runs": options.runs,
        "seed": options.seed,
        "versions": versions(),
        "revision": revision(),
        "command": command_line(),
    }


@dataclass(frozen=True)
class Benchmark:
    """One benchmark; its stages share target, prompts and options."""

    target: LoadedTarget
    options: BenchOptions
    requests: Sequence[Request]
    results: Results
    make: MakeContestants

    @property
    def stages(self) -> list[Stage]:
        """Every temperature with every batch size."""
        return [
            Stage(temperature, num_rows)
            for temperature in temperatures_in(self.options.temperature)
            for num_rows in batches_in(self.options.batch)
        ]

    def measure(self, stage: Stage) -> None:
        """Runs what is not among the results yet, and adds it to them."""
        batches = batches_of(self.requests, stage.num_rows)
        contestants = self.make(self.target, self.options, self.requests, stage)
        known = {sample.trial for sample in self.results.samples(stage, batches)}
        num_missing = len(batches) * self.options.runs - len(known)
        if not num_missing:
            return
        known_programs = self.results.programs(stage)
        for contestant in with_progress(contestants, f"{stage}: compiling", len(contestants)):
            fresh = warm_up([contestant], batches[0])
            if contestant.name not in known_programs:
                self.results.add_programs(stage, fresh)
        turns = measure_trials(
            contestants,
            batches,
            self.options.runs,
            known,
            lambda: self.results.add_bandwidth(stage, read_bandwidth()),
        )
        for turn in with_progress(turns, f"{stage}: measuring", num_missing):
            self.results.add_turn(stage, turn)

    def conclude(self) -> list[Measurement]:
        """Shows and keeps the rows and texts of all turns so far."""
        found, num_missing = {}, 0
        for stage in self.stages:
            batches = batches_of(self.requests, stage.num_rows)
            found[stage] = self.results.samples(stage, batches)
            num_turns = len({sample.trial for sample in found[stage]})
            num_missing += len(batches) * self.options.runs - num_turns
        rows, texts = [], []
        tokenizer = self.target.require_tokenizer()
        for stage, samples in found.items():
            if samples:
                of_stage = [
                    replace(row, num_missing=num_missing) for row in self._rows(stage, samples)
                ]
                sampling = sampling_of(self.options, stage.temperature)
                show(of_stage, self.options.runs, self.results.bandwidth(stage), sampling)
                rows += of_stage
                texts += texts_of(stage, samples, tokenizer)
        if rows:
            self.results.write_rows(rows)
            self.results.write_texts(texts)
        return rows

    def _rows(self, stage: Stage, samples: Sequence[Sample]) -> list[Measurement]:
        sampling = sampling_of(self.options, stage.temperature)
        compare = NearTies(self.target, sampling, self.options.seed)
        programs, bandwidth = self.results.programs(stage), self.results.bandwidth(stage)
        return [
            with_bandwidth_share(row, self.target, bandwidth)
            for row in summarise(samples, programs, compare, stage.temperature)
        ]

    def trace(self) -> None:
        """Times the parts of our methods' rounds at the first temperature, on two prompts."""
        if self.results.has_traces:
            return
        stage = Stage(self.stages[0].temperature, 1)
        own = _own_methods(self.target, self.options, self.requests, stage)
        traces = trace(own, [self.requests[0].ids, self.requests[-1].ids])
        values = {"temperature": stage.temperature, **trace_values(traces, NUM_DRAWN)}
        self.results.write_traces(values)


def texts_of(stage: Stage, samples: Sequence[Sample], tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Yields the text of every method for the first prompt of each kind, token by token."""
    seen = set()
    for sample in sorted(samples, key=lambda each: each.number):
        kind, text = sample.batch[0].kind, sample.texts[0]
        is_known = len(text.from_draft) == len(text.tokens)
        if (sample.method, kind) in seen or not is_known:
            continue
        seen.add((sample.method, kind))
        yield {
            **stage._asdict(),
            "method": sample.method,
            "kind": kind,
            "prompt": tokenizer.decode(sample.batch[0].ids)[-LONGEST_PROMPT:],
            "pieces": token_texts(tokenizer, text.tokens),
            "from_draft": list(text.from_draft),
        }


def _check_memory(own: Sequence[Runner], requests: Sequence[Request], num_rows: int) -> None:
    for method in own:
        prompt, _ = method.prepare([requests[0].ids] * num_rows)
        try:
            method.engine.check(method.params, prompt, room=1)  # texts may end with the window
        except SpecjaxError as error:
            raise SpecjaxError(f"{method.name}: {error}") from None


def _own_methods(
    target: LoadedTarget, options: BenchOptions, requests: Sequence[Request], stage: Stage
) -> list[Runner]:
    made = make_contestants(target, replace(options, peers=""), requests, stage)
    return [each for each in made if isinstance(each, Runner)]
