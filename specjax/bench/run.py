"""Runs a benchmark: measures methods on tasks and summarises their gain over plain decoding."""

import json
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax

from specjax.bench.bandwidth import read_bandwidth, with_bandwidth_share
from specjax.bench.measure import (
    PLAIN,
    Contestant,
    TaskPrompt,
    batches_of,
    measure_trials,
    warm_up,
    with_progress,
)
from specjax.bench.options import (
    BenchOptions,
    MethodVariant,
    names_in,
    parse_variants,
    sources_in,
    variants_for,
)
from specjax.bench.report.terminal import show
from specjax.bench.results import Condition, Results, make_folder, open_results
from specjax.bench.summary import Measurement, summarise
from specjax.bench.ties import NearTies
from specjax.core.chat import read_template, with_template
from specjax.core.companions import companion
from specjax.core.errors import SpecjaxError, errors_at
from specjax.core.folder import RunFolder
from specjax.core.provenance import command_line, machine, revision, versions
from specjax.core.settings import check_fields
from specjax.decoding.prompt import padded_length
from specjax.loading.drafters import load_drafter
from specjax.loading.hub import POCKET
from specjax.loading.methods import METHODS
from specjax.loading.parts import load_draft
from specjax.loading.targets import LoadedTarget
from specjax.loading.vocabularies import check_same_tokens
from specjax.models.fingerprint import fingerprint
from specjax.models.native import products
from specjax.run.distillation import answers_of
from specjax.run.engines import make_engine
from specjax.run.runner import Runner
from specjax.run.tasks import count_cut, read_tasks, task_prompts

KEPT_OPTIONS = "peers max_new_tokens temperature batch verification runs seed".split()


def make_runners(
    target: LoadedTarget, options: BenchOptions, prompts: Sequence[TaskPrompt], condition: Condition
) -> list[Runner]:
    """Makes plain decoding and the other methods in the order they are named."""
    sampling = options.sampling(condition.temperature)
    width = padded_length([prompt.ids for prompt in prompts])
    variants = {PLAIN: MethodVariant(PLAIN)}
    variants |= variants_for(options.methods, options.drafter, options.set, target)
    made: list[Runner] = []
    heads: dict[Any, Any] = {}  # variants that read the same head share one copy
    for name, (method, source, fixed) in variants.items():
        drafter, params = load_drafter(method, target, source, **fixed)
        if head := METHODS[method].head:
            params = heads.setdefault((head.kind, source or METHODS[method].part), params)
        engine = make_engine(target, (drafter, params), options.max_new_tokens, sampling)
        made.append(Runner(name, *engine, width, options.seed))
    return made


def make_contestants(
    target: LoadedTarget, options: BenchOptions, prompts: Sequence[TaskPrompt], condition: Condition
) -> list[Contestant]:
    """Makes plain decoding, the other methods in the order they are named, then peers."""
    made: list[Contestant] = [*make_runners(target, options, prompts, condition)]
    if names_in(options.peers) and condition.temperature == 0:
        source = sources_in(options.drafter).get("draft-model")
        draft = None
        if target.name == POCKET or source:
            draft = load_draft(target, source)
            check_same_tokens(target, draft)
        peers = companion("peers")
        longest = max(len(prompt.ids) for prompt in prompts)
        work = peers.Work(target, draft, longest, options.max_new_tokens)
        made += peers.peers(names_in(options.peers), work, condition.batch_size)
    return made


MakeContestants = Callable[
    [LoadedTarget, BenchOptions, Sequence[TaskPrompt], Condition], list[Contestant]
]


def run_bench(
    load_target: Callable[[], LoadedTarget],
    options: BenchOptions,
    make: MakeContestants = make_contestants,
) -> list[Measurement]:
    """Measures, prints a table per temperature and batch size, and returns all rows.

    An interrupted benchmark prints and keeps its complete trials; the same options and folder
    resume it. `load_target` is called after all checks that do not need the target, and `make`
    makes the contestants, plain decoding first.
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
        prompts = task_prompts(tasks, target, options.max_new_tokens, answer)
        num_turns = sum(len(task.turns) for task in tasks)
        results = open_results(folder, about(target, options, prompts, num_turns))
        benchmark = Benchmark(target, options, prompts, results, make)
        try:
            for condition in benchmark.conditions:
                benchmark.measure(condition)
                jax.clear_caches()  # the number of compiled programs in a process is limited
        finally:
            rows = benchmark.summarise()
    return rows


def check(options: BenchOptions) -> None:
    """Checks the options that do not depend on the target."""
    check_fields(options)
    for temperature in options.temperatures:
        options.sampling(temperature)
    batch_sizes = options.batch_sizes
    if options.chat_template is not None:
        read_template(options.chat_template)
    parse_variants(options.methods, options.drafter, options.set)
    if options.peers and 0 not in options.temperatures:
        raise SpecjaxError(
            "peers draw other noise, so their texts differ; use temperature 0 with peers"
        )
    names = names_in(options.peers)
    if len(set(names)) < len(names):
        raise SpecjaxError(f"--peers {options.peers!r} must list different libraries")
    for name in names:
        companion("peers").check_peer(name, batch_sizes)


def about(
    target: LoadedTarget, options: BenchOptions, prompts: Sequence[TaskPrompt], num_turns: int
) -> dict[str, Any]:
    """Describes a benchmark: target, device, prompts, methods, settings, versions, command.

    It is resumed only if everything but the command is the same. The tasks have `num_turns` turns,
    and `prompts` are those that fit the target.
    """
    for name in names_in(options.peers):
        companion("peers").PEERS[name].check(target)
    runners = make_runners(target, options, prompts, Condition(options.temperatures[0], 1))
    for runner in runners:
        padded, _ = runner.prepare([prompts[0].ids] * max(options.batch_sizes))
        with errors_at(runner.name):
            runner.engine.check(runner.params, padded, room=1)  # texts may end with the window
    checksum = zlib.crc32(json.dumps([(prompt.kind, prompt.ids) for prompt in prompts]).encode())
    return {
        "target": target.name,
        "fingerprint": fingerprint(target.config, target.params),
        "dtype": target.dtype_name,
        "products": products(target.params),
        "padded_width": target.model.padded_width,
        "mesh": None if target.mesh is None else dict(target.mesh.shape),
        "device": jax.devices()[0].device_kind,
        "machine": machine(),
        "tasks": options.tasks,
        "num_prompts": len(prompts),
        "num_left_out": num_turns - len(prompts) or None,
        "num_cut": count_cut(prompts, target.config, options.max_new_tokens) or None,
        "prompts": f"{checksum:08x}",
        "padded_length": runners[0].padded_length,
        "methods": {runner.name: runner.settings for runner in runners},
        **{name: getattr(options, name) for name in KEPT_OPTIONS},
        "versions": versions(),
        "revision": revision(),
        "command": command_line(),
    }


@dataclass(frozen=True)
class Benchmark:
    """One benchmark; its conditions share target, prompts and options."""

    target: LoadedTarget
    options: BenchOptions
    prompts: Sequence[TaskPrompt]
    results: Results
    make: MakeContestants

    @property
    def conditions(self) -> list[Condition]:
        pairs = product(self.options.temperatures, self.options.batch_sizes)
        return [Condition(*pair) for pair in pairs]

    def measure(self, condition: Condition) -> None:
        """Runs the trials that are missing from the results, and adds them."""
        batches = batches_of(self.prompts, condition.batch_size)
        contestants = self.make(self.target, self.options, self.prompts, condition)
        finished = {sample.trial for sample in self.results.samples(condition, batches)}
        num_missing = len(batches) * self.options.runs - len(finished)
        if not num_missing:
            return
        programs = self.results.programs(condition)
        for contestant in with_progress(contestants, f"{condition}: compiling"):
            program = warm_up(contestant, batches[0])
            if contestant.name not in programs:
                self.results.add_program(condition, contestant.name, program)
        trials = measure_trials(
            contestants,
            batches,
            self.options.runs,
            finished,
            lambda: self.results.add_bandwidth(condition, read_bandwidth()),
        )
        for trial in with_progress(trials, f"{condition}: measuring", num_missing):
            self.results.add_trial(condition, trial)

    def summarise(self) -> list[Measurement]:
        """Prints and keeps the rows of all trials so far."""
        batches = {c: batches_of(self.prompts, c.batch_size) for c in self.conditions}
        samples = {c: self.results.samples(c, batches[c]) for c in self.conditions}
        num_trials = sum(len({sample.trial for sample in runs}) for runs in samples.values())
        num_missing = sum(map(len, batches.values())) * self.options.runs - num_trials
        options = self.options
        variants = parse_variants(options.methods, options.drafter, options.set)
        renamed = {name: method for name, (method, *_) in variants.items() if method != name}
        rows = []
        for condition in filter(samples.get, self.conditions):
            sampling = options.sampling(condition.temperature)
            compare = NearTies(self.target, sampling, options.seed)
            programs = self.results.programs(condition)
            bandwidth = self.results.bandwidth(condition)
            summary = [
                replace(
                    with_bandwidth_share(row, self.target, bandwidth),
                    num_missing=num_missing,
                    variant_of=renamed.get(row.method, ""),
                )
                for row in summarise(samples[condition], programs, compare, condition.temperature)
            ]
            show(summary, options.runs, bandwidth, sampling)
            rows += summary
        if rows:
            self.results.write_rows(rows)
        return rows
