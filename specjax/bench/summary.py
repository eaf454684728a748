"""Summarises the timed runs of a benchmark: one row per method and kind of task."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache
from itertools import groupby, zip_longest
from statistics import fmean, median, stdev
from typing import NamedTuple

import numpy as np

from specjax.bench.acceptance import Acceptance
from specjax.bench.measure import PLAIN, Sample
from specjax.run.runner import Program, Trial

ALL = "all"  # the task of the rows over all kinds
GROUPS = {  # kinds that papers report as one
    "mt-bench": "writing roleplay reasoning math coding extraction stem humanities".split()
}


class TextMatch(IntEnum):
    """The outcome of comparing a text with plain decoding's; higher is worse."""

    NOT_COMPARED = 0  # another dtype or sampling
    SAME = 1
    NEAR_TIE = 2  # differs, but only from a place where the dtype cannot rank two tokens
    DIFFERENT = 3


class TextPair(NamedTuple):
    """A method's continuation of a prompt, and plain decoding's in the same trial."""

    method: str
    dtypes: tuple[str, str]  # of the method and of plain decoding
    ids: tuple[int, ...]
    tokens: tuple[int, ...]
    plain: tuple[int, ...]
    trial: Trial = (0, 0)  # with the two below, it determines the noise
    sequence: int = 0  # of the batch
    batch_size: int = 1


Compare = Callable[[TextPair], TextMatch]


def exactly(texts: TextPair) -> TextMatch:
    """Accepts no difference within one dtype."""
    if texts.dtypes[0] != texts.dtypes[1]:
        return TextMatch.NOT_COMPARED
    return TextMatch.SAME if texts.tokens == texts.plain else TextMatch.DIFFERENT


@dataclass(frozen=True)
class Published:
    """Figures as papers compute them: means over questions, and over runs of all of them.

    A question is a prompt, or all turns of a chat (of a batch: all of its prompts). Standard
    deviations are over the runs; None below two.
    """

    tokens_per_second: float  # of a question
    tokens_per_second_std: float | None
    speed_up: float  # the former over plain's, in the same run
    speed_up_std: float | None
    tau: float  # accepted drafted tokens per round and 1: mean over questions (EAGLE, HASS)
    pooled_tau: float  # the same: mean over all rounds (Spec-Bench)


@dataclass(frozen=True)
class Measurement:
    """One method on all prompts of one kind, or of all, at one temperature and batch size."""

    method: str
    dtype: str
    task: str
    num_prompts: int  # with the repeats that fill a batch
    num_new_tokens: int  # of the first run of each prompt, as rounds and passes
    rounds: int  # of all prompts
    passes: int  # of the target: a batch takes as many as its longest sequence
    # New tokens per round, bonus included, over all prompts. Unlike in `published.tau`, tokens that
    # EOS or the limit cuts off a draft do not count.
    mean_accepted_length: float
    accepted_lengths: tuple[int, ...]  # entry n: rounds that committed n tokens; empty: unknown
    mean_length: float  # tokens of prompt and text so far, mean over the rounds
    seconds: float  # of one run, prefill included: the sum of the batches' medians
    prefill_seconds: float | None  # this and the next are None where not measured separately
    decode_seconds: float | None
    tokens_per_second: float
    ratio: float  # speed over plain's, median over pairs of runs (same batch, same repeat)
    ratio_quartiles: tuple[float, float]
    round_overhead: float | None  # decoding seconds per pass over plain's, median over pairs
    is_compared: bool  # with plain decoding's texts: not if dtype or sampling differs
    num_near_ties: int  # prompts where a run differed, but only from a near tie on
    num_different: int  # prompts where a run differed without that excuse
    num_recompiled: int  # measured runs that compiled something, so their times are wrong
    compile_seconds: float
    is_cached: bool  # part of it came from a cache, so compile_seconds is too small
    peak_bytes: int | None  # weights, caches and temporaries; unknown for peers
    published: Published
    temperature: float = 0.0
    batch: int = 1  # sequences
    bandwidth_share: float | None = None  # of the device's memory bandwidth; unknown for peers
    is_total: bool = False  # over several kinds of task
    num_missing: int = 0  # trials of the whole benchmark that have not been measured yet
    variant_of: str = ""  # the method in `METHODS`, if it was measured under another name

    @property
    def identical(self) -> bool | None:
        """Whether every run matched plain decoding; None if that is not compared."""
        return self.num_near_ties + self.num_different == 0 if self.is_compared else None

    @property
    def rates(self) -> list[float]:
        """See `Acceptance.rates`, from depth 1 on."""
        return Acceptance(self.accepted_lengths).rates


def summarise(
    samples: Sequence[Sample],
    programs: Mapping[str, Program],
    compare: Compare = exactly,
    temperature: float = 0.0,
) -> list[Measurement]:
    """Returns one row per kind of task and method, then rows over `GROUPS` and over all kinds.

    `samples` are runs at one temperature and batch size, plain decoding's among them. `programs`
    holds all methods, in the order of their rows.
    """
    matches = _matches(samples, compare, temperature)
    kinds = list(dict.fromkeys(sample.batch[0].kind for sample in samples))
    tasks: dict[str, tuple[str, ...]] = {kind: (kind,) for kind in kinds}
    for name, members in {**GROUPS, ALL: kinds}.items():
        present = [kind for kind in kinds if kind in members]
        if len(present) > 1 and (name == ALL or len(present) < len(kinds)):
            tasks[f"{name} (total)" if name in kinds else name] = tuple(present)
    rows = []
    for task, members in tasks.items():
        of_task = [sample for sample in samples if sample.batch[0].kind in members]
        plain = _plain(of_task)
        for name, program in programs.items():
            if of_method := [sample for sample in of_task if sample.method == name]:
                row = _summary(task, of_method, plain, program, matches)
                rows.append(replace(row, temperature=temperature, is_total=len(members) > 1))
    return rows


def last_task_rows(rows: Sequence[Measurement]) -> list[Measurement]:
    """Returns the rows over all kinds of task, or of the only one."""
    return [row for row in rows if row.task == rows[-1].task]


Matches = Mapping[tuple[str, int], Sequence[TextMatch]]  # of a method on a batch's sequences


def _matches(samples: Sequence[Sample], compare: Compare, temperature: float) -> Matches:
    """Returns the worst match over the repeats."""
    plain, compare = _plain(samples), cache(compare)  # without noise most repeats are equal
    worst: dict[tuple[str, int], list[TextMatch]] = {}
    for sample in samples:
        baseline, matches = plain[sample.trial], []
        for number, (text, other) in enumerate(zip(sample.texts, baseline.texts, strict=True)):
            dtypes, ids = (sample.dtype, baseline.dtype), sample.batch[number].ids
            pair = TextPair(sample.method, dtypes, ids, text.tokens, other.tokens)
            if temperature > 0:
                pair = TextPair(*pair[:5], sample.trial, number, len(sample.batch))
            matches.append(compare(pair))
        before = worst.get((sample.method, sample.number), matches)
        worst[sample.method, sample.number] = list(map(max, before, matches))
    return worst


def _plain(samples: Iterable[Sample]) -> dict[Trial, Sample]:
    return {sample.trial: sample for sample in samples if sample.method == PLAIN}


def _summary(
    task: str,
    samples: Sequence[Sample],
    plain: Mapping[Trial, Sample],
    program: Program,
    matches: Matches,
) -> Measurement:
    first = {sample.number: sample for sample in reversed(samples)}.values()  # runs of the batches
    texts = [text for sample in first for text in sample.texts]
    num_new_tokens = sum(len(text.tokens) for text in texts)
    rounds = sum(text.rounds for text in texts)
    pairs = [(sample, plain[sample.trial]) for sample in samples]
    ratios = [sample.speed / baseline.speed for sample, baseline in pairs]
    low, ratio, high = map(float, np.percentile(ratios, (25, 50, 75)))
    prefill = decode = overhead = None
    if all(sample.prefill_seconds is not None for sample in samples):
        prefill = _total(samples, lambda sample: sample.prefill_seconds or 0.0)
        decode = _total(samples, lambda sample: sample.decode_seconds)
        overhead = median(run.round_seconds / baseline.round_seconds for run, baseline in pairs)
    seconds = _total(samples, lambda sample: sample.seconds)
    counts = Counter(match for sample in first for match in matches[sample.method, sample.number])
    histograms = [text.accepted_lengths for text in texts]
    histogram = map(sum, zip_longest(*histograms, fillvalue=0)) if all(histograms) else ()
    return Measurement(
        method=samples[0].method,
        dtype=samples[0].dtype,
        task=task,
        num_prompts=len(texts),
        num_new_tokens=num_new_tokens,
        rounds=rounds,
        passes=sum(sample.passes for sample in first),
        mean_accepted_length=num_new_tokens / max(rounds, 1),
        accepted_lengths=tuple(histogram),
        mean_length=sum(map(_length_over_rounds, first)) / max(rounds, 1),
        prefill_seconds=prefill,
        decode_seconds=decode,
        seconds=seconds,
        tokens_per_second=num_new_tokens / seconds,
        ratio=ratio,
        ratio_quartiles=(low, high),
        round_overhead=overhead,
        is_compared=not counts[TextMatch.NOT_COMPARED],
        num_near_ties=counts[TextMatch.NEAR_TIE],
        num_different=counts[TextMatch.DIFFERENT],
        num_recompiled=sum(sample.num_compiled > 0 for sample in samples),
        compile_seconds=program.compile_seconds,
        is_cached=program.is_cached,
        peak_bytes=program.peak_bytes,
        published=_published(samples, plain),
        batch=len(samples[0].batch),
    )


def _published(samples: Sequence[Sample], plain: Mapping[Trial, Sample]) -> Published:
    num_batches = len({sample.number for sample in samples})
    repeats = _grouped(samples, lambda sample: sample.repeat)
    # The repeats that ran all batches; if none did, all samples are one run.
    runs = [run for run in repeats if len(run) == num_batches] or [samples]
    speeds = [_throughput(run) for run in runs]
    ratios = [
        speed / _throughput([plain[sample.trial] for sample in run])
        for speed, run in zip(speeds, runs, strict=True)
    ]
    questions = [question for run in runs for question in _questions(run)]
    return Published(
        fmean(speeds),
        stdev(speeds) if len(speeds) > 1 else None,
        fmean(ratios),
        stdev(ratios) if len(ratios) > 1 else None,
        fmean(map(_tau, questions)),
        _tau(samples),
    )


def _grouped(samples: Iterable[Sample], key: Callable[[Sample], int]) -> list[list[Sample]]:
    return [list(group) for _, group in groupby(sorted(samples, key=key), key)]


def _questions(run: Iterable[Sample]) -> list[list[Sample]]:
    """Groups a run by question: the turns of a chat are consecutive."""
    questions: list[list[Sample]] = []
    for sample in sorted(run, key=lambda sample: sample.trial):
        is_later_turn = sample.batch[0].turn > 0
        if not questions or not is_later_turn or len(sample.batch) > 1:
            questions.append([])
        questions[-1].append(sample)
    return questions


def _throughput(run: Iterable[Sample]) -> float:
    return fmean(
        sum(sample.num_tokens for sample in question) / sum(sample.seconds for sample in question)
        for question in _questions(run)
    )


def _tau(samples: Sequence[Sample]) -> float:
    texts = [text for sample in samples for text in sample.texts]
    return 1 + sum(text.num_accepted for text in texts) / max(1, sum(text.rounds for text in texts))


def _length_over_rounds(sample: Sample) -> float:
    """Returns the length of the texts, summed over their rounds, as if they grew evenly."""
    return sum(
        (len(request.ids) + len(text.tokens) / 2) * text.rounds
        for request, text in zip(sample.batch, sample.texts, strict=True)
    )


def _total(samples: Sequence[Sample], read: Callable[[Sample], float]) -> float:
    """Returns the sum over the batches of their medians, each for the tokens of the first run.

    At temperature 0 all runs of a batch have the same tokens; above, the median is per token.
    """
    return sum(
        runs[0].num_tokens * median(read(run) / run.num_tokens for run in runs)
        for runs in _grouped(samples, lambda sample: sample.number)
    )
