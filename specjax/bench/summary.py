"""Sums up the timed runs of a benchmark: one row per method and kind of task."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import zip_longest
from statistics import median
from typing import NamedTuple

import numpy as np

from specjax.bench.acceptance import Acceptance
from specjax.bench.measure import PLAIN, Program, Sample

ALL = "all"  # the task of the rows that sum up all kinds


class TextMatch(IntEnum):
    """The outcome of comparing a text with plain decoding's; the higher, the worse."""

    NOT_COMPARED = 0  # another dtype rounds differently, and other sampling may draw differently
    SAME = 1
    NEAR_TIE = 2  # differs, but only from a place on where the dtype cannot rank two tokens
    DIFFERENT = 3


class TextPair(NamedTuple):
    """A method's continuation of a prompt, and plain decoding's in the same turn."""

    method: str
    dtypes: tuple[str, str]  # of the method and of plain decoding
    ids: tuple[int, ...]
    row: int  # of the batch: each row has noise of its own
    own: tuple[int, ...]
    plain: tuple[int, ...]


Compare = Callable[[TextPair], TextMatch]


def exactly(texts: TextPair) -> TextMatch:
    """Accepts no difference within one dtype."""
    if texts.dtypes[0] != texts.dtypes[1]:
        return TextMatch.NOT_COMPARED
    return TextMatch.SAME if texts.own == texts.plain else TextMatch.DIFFERENT


@dataclass(frozen=True)
class Measurement:
    """One method on all prompts of one kind, at one temperature and batch size."""

    method: str
    dtype: str
    task: str
    num_prompts: int
    num_new_tokens: int  # of one run of each prompt
    rounds: int  # of all prompts
    passes: int  # of the target: a batch takes as many as its row with most rounds
    mean_accepted_length: float  # new tokens per round, bonus included, over all prompts
    accepted_lengths: tuple[int, ...]  # entry n: rounds that committed n tokens; empty: unknown
    mean_length: float  # tokens of prompt and text so far, mean over the rounds
    seconds: float  # of one run, prefill included: the sum of the batches' medians
    prefill_seconds: float | None  # this and the next are None where not measured separately
    decode_seconds: float | None
    tokens_per_second: float
    spread: float | None  # (slowest - fastest) / median run of all prompts; None below 2 runs
    ratio: float  # speed over plain's, median over pairs of runs (same batch, same repeat)
    ratio_quartiles: tuple[float, float]
    round_seconds: float | None  # of decoding, per pass
    round_overhead: float | None  # round_seconds over plain's, median over pairs
    round_overhead_quartiles: tuple[float, float] | None
    is_compared: bool  # with plain decoding's texts: not if dtype or sampling differs
    num_near_ties: int  # prompts where a run differed, but only from a near tie on
    num_different: int  # prompts where a run differed without that excuse
    num_recompiled: int  # measured runs that compiled something, so their times are wrong
    compile_seconds: float
    is_cached: bool  # part of it came from a cache, so compile_seconds is too small
    peak_bytes: int | None  # weights, caches and temporaries together; unknown for peers
    temperature: float = 0.0
    batch: int = 1  # prompts at once
    bandwidth_share: float | None = None  # of what the device can read; unknown for peers
    is_total: bool = False  # sums up several kinds
    num_missing: int = 0  # turns of the whole benchmark that have not been measured yet

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
    """Returns one row per kind of task and method, then over all kinds if there are several.

    Args:
        samples: runs at one temperature and batch size, plain decoding's among them.
        programs: all methods, in the order of their rows.
        compare: compares texts with plain decoding's.
        temperature: of the runs.
    """
    matches = _matches(samples, compare)
    kinds = list(dict.fromkeys(sample.batch[0].kind for sample in samples))
    tasks = [(kind, [each for each in samples if each.batch[0].kind == kind]) for kind in kinds]
    if len(kinds) > 1:
        tasks.append((ALL, list(samples)))
    rows = []
    for place, (task, of_task) in enumerate(tasks):
        plain = {each.turn: each for each in of_task if each.method == PLAIN}
        for name, program in programs.items():
            own = [each for each in of_task if each.method == name]
            if own:
                row = _summary(task, own, plain, program, matches)
                rows.append(replace(row, temperature=temperature, is_total=place == len(kinds)))
    return rows


def last_task_rows(rows: Sequence[Measurement]) -> list[Measurement]:
    """Returns the rows over all kinds of task, or of the only one."""
    return [row for row in rows if row.task == rows[-1].task]


Matches = Mapping[tuple[str, int], Sequence[TextMatch]]  # of a method on the rows of a batch


def _matches(samples: Sequence[Sample], compare: Compare) -> Matches:
    """Returns the worst match over the repeats."""
    plain = {each.turn: each for each in samples if each.method == PLAIN}
    worst: dict[tuple[str, int], list[TextMatch]] = {}
    known: dict[TextPair, TextMatch] = {}  # most repeats say the same
    for own in samples:
        other = plain[own.turn]
        found = []
        for row, (text, baseline) in enumerate(zip(own.texts, other.texts, strict=True)):
            dtypes, ids = (own.dtype, other.dtype), own.batch[row].ids
            texts = TextPair(own.method, dtypes, ids, row, text.tokens, baseline.tokens)
            if texts not in known:
                known[texts] = compare(texts)
            found.append(known[texts])
        before = worst.get((own.method, own.number), found)
        worst[own.method, own.number] = list(map(max, before, found))
    return worst


def _summary(
    task: str,
    samples: Sequence[Sample],
    plain: Mapping[tuple[int, int], Sample],
    program: Program,
    matches: Matches,
) -> Measurement:
    once = {sample.number: sample for sample in samples}.values()  # one run of each batch
    texts = [text for sample in once for text in sample.texts]
    num_new_tokens = sum(len(text.tokens) for text in texts)
    rounds = sum(text.rounds for text in texts)
    pairs = [(sample, plain[sample.turn]) for sample in samples]
    ratio, ratio_quartiles = _middle([own.speed / other.speed for own, other in pairs])
    passes = sum(sample.passes for sample in once)
    prefill = decode = overhead = overhead_quartiles = None
    if all(sample.prefill_seconds is not None for sample in samples):
        prefill = _total(samples, lambda sample: sample.prefill_seconds or 0.0)
        decode = _total(samples, lambda sample: sample.decode_seconds)
        overheads = [_round_seconds(own) / _round_seconds(other) for own, other in pairs]
        overhead, overhead_quartiles = _middle(overheads)
    seconds = _total(samples, lambda sample: sample.seconds)
    found = Counter(match for sample in once for match in matches[sample.method, sample.number])
    return Measurement(
        method=samples[0].method,
        dtype=samples[0].dtype,
        task=task,
        num_prompts=len(texts),
        num_new_tokens=num_new_tokens,
        rounds=rounds,
        passes=passes,
        mean_accepted_length=num_new_tokens / max(rounds, 1),
        accepted_lengths=_histogram([text.accepted_lengths for text in texts]),
        mean_length=sum(map(_length_over_rounds, once)) / max(rounds, 1),
        prefill_seconds=prefill,
        decode_seconds=decode,
        seconds=seconds,
        tokens_per_second=num_new_tokens / seconds,
        spread=_spread(samples),
        ratio=ratio,
        ratio_quartiles=ratio_quartiles,
        round_seconds=None if decode is None else decode / max(passes, 1),
        round_overhead=overhead,
        round_overhead_quartiles=overhead_quartiles,
        is_compared=not found[TextMatch.NOT_COMPARED],
        num_near_ties=found[TextMatch.NEAR_TIE],
        num_different=found[TextMatch.DIFFERENT],
        num_recompiled=sum(sample.num_compiled > 0 for sample in samples),
        compile_seconds=program.compile_seconds,
        is_cached=program.is_cached,
        peak_bytes=program.peak_bytes,
        batch=len(samples[0].batch),
    )


def _middle(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Returns the median and the quartiles."""
    low, middle, high = (float(value) for value in np.percentile(values, (25, 50, 75)))
    return middle, (low, high)


def _histogram(counts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the sum of all; empty if one of them is unknown."""
    if not all(counts):
        return ()
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))


def _length_over_rounds(sample: Sample) -> float:
    """Returns the length of the texts, summed over their rounds: they grow evenly."""
    return sum(
        (len(request.ids) + len(text.tokens) / 2) * text.rounds
        for request, text in zip(sample.batch, sample.texts, strict=True)
    )


def _total(samples: Sequence[Sample], read: Callable[[Sample], float]) -> float:
    """Returns the sum over the batches of the median over their runs."""
    found: dict[int, list[float]] = {}
    for sample in samples:
        found.setdefault(sample.number, []).append(read(sample))
    return sum(map(median, found.values()))


def _round_seconds(sample: Sample) -> float:
    return sample.decode_seconds / max(sample.passes, 1)


def _spread(samples: Sequence[Sample]) -> float | None:
    """Returns how far apart the repeats of all batches lie; unfinished repeats do not count."""
    found: dict[int, list[float]] = {}
    for sample in samples:
        found.setdefault(sample.repeat, []).append(sample.seconds)
    num_batches = len({sample.number for sample in samples})
    totals = [sum(seconds) for seconds in found.values() if len(seconds) == num_batches]
    return (max(totals) - min(totals)) / median(totals) if len(totals) > 1 else None
