"""What the timed runs of a benchmark come to: one row per method and kind of task."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import zip_longest
from statistics import median
from typing import NamedTuple

import numpy as np

from specjax.bench.acceptance import Acceptance
from specjax.bench.measure import PLAIN, Program, Sample

ALL = "all"  # the task of the rows that sum up all kinds


class Verdict(IntEnum):
    """How a text compares with plain decoding's; the higher, the worse."""

    NOT_COMPARED = 0  # another dtype rounds otherwise, and another way may draw otherwise
    SAME = 1
    NEAR_TIE = 2  # other, from a place on where the dtype cannot tell two tokens apart
    DIFFERENT = 3


class Said(NamedTuple):
    """What a method said to a prompt, and what plain decoding said in the same run."""

    method: str
    dtypes: tuple[str, str]  # of the method and of plain decoding
    ids: tuple[int, ...]
    row: int  # of the batch: the noise of a row is its own
    own: tuple[int, ...]
    plain: tuple[int, ...]


Judge = Callable[[Said], Verdict]


def exactly(said: Said) -> Verdict:
    """The judge that accepts no difference within one dtype."""
    if said.dtypes[0] != said.dtypes[1]:
        return Verdict.NOT_COMPARED
    return Verdict.SAME if said.own == said.plain else Verdict.DIFFERENT


@dataclass(frozen=True)
class Measurement:
    """One method on all prompts of one kind, at one temperature and size of batch."""

    method: str
    dtype: str
    task: str
    num_prompts: int
    num_new_tokens: int  # of one run of each prompt
    rounds: int  # of all prompts
    passes: int  # of the target: a batch takes as many as the row with most rounds
    mean_accepted_length: float  # new tokens per round, pooled, bonus included
    accepted_lengths: tuple[int, ...]  # entry n: rounds that committed n tokens; empty: not told
    mean_length: float  # tokens of prompt and text so far, mean over the rounds
    seconds: float  # of one run, prefill included: the sum of the batches' medians
    prefill_seconds: float | None  # likewise; this and the next are None where not told apart
    decode_seconds: float | None
    tokens_per_second: float
    spread: float | None  # slowest less fastest run of all prompts, over the median; None: below 2
    ratio: float  # speed over plain's, in pairs of runs (same batch, same repeat): the median
    ratio_quartiles: tuple[float, float]
    round_seconds: float | None  # of decoding, per pass
    round_overhead: float | None  # round_seconds over plain's, in pairs: the median
    round_overhead_quartiles: tuple[float, float] | None
    is_compared: bool  # with what plain decoding said: not if the dtype or the drawing is another
    num_near_ties: int  # prompts where a run said something else, but only from a near tie on
    num_different: int  # prompts where a run said something else without that excuse
    num_recompiled: int  # measured runs that compiled something, and so are not to be trusted
    compile_seconds: float
    is_cached: bool  # some of it came from a cache: compile_seconds tells less than the whole
    peak_bytes: int | None  # weights, caches and temporaries together; not known of peers
    temperature: float = 0.0
    batch: int = 1  # prompts at once
    bandwidth_share: float | None = None  # of what the device can read; not known of peers
    is_total: bool = False  # sums up several kinds
    num_missing: int = 0  # turns of the whole benchmark that have not been measured yet

    @property
    def identical(self) -> bool | None:
        """Whether every run said what plain decoding said; None if that is not compared."""
        return self.num_near_ties + self.num_different == 0 if self.is_compared else None

    @property
    def rates(self) -> list[float]:
        """`Acceptance.rates`, from depth 1 on."""
        return Acceptance(self.accepted_lengths).rates


def summarise(
    samples: Sequence[Sample],
    programs: Mapping[str, Program],
    judge: Judge = exactly,
    temperature: float = 0.0,
) -> list[Measurement]:
    """One row per kind of task and method, then over all kinds if there are several.

    Args:
        samples: runs at one temperature and size of batch, plain decoding's among them.
        programs: all methods, in the order of their rows.
        judge: compares texts with plain decoding's.
        temperature: that the rows tell.
    """
    verdicts = _verdicts(samples, judge)
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
                row = _summary(task, own, plain, program, verdicts, temperature)
                rows.append(replace(row, is_total=place == len(kinds)))
    return rows


def whole(samples: Sequence[Sample], methods: Iterable[str]) -> list[Sample]:
    """The samples of the turns that every method had."""
    expected = set(methods)
    found: dict[tuple[int, int], set[str]] = {}
    for sample in samples:
        found.setdefault(sample.turn, set()).add(sample.method)
    return [sample for sample in samples if found[sample.turn] >= expected]


Verdicts = Mapping[tuple[str, int], Sequence[Verdict]]  # of a method on the rows of a batch


def _verdicts(samples: Sequence[Sample], judge: Judge) -> Verdicts:
    """The worst over the repeats."""
    plain = {each.turn: each for each in samples if each.method == PLAIN}
    worst: dict[tuple[str, int], list[Verdict]] = {}
    known: dict[Said, Verdict] = {}  # repeats mostly say the same
    for own in samples:
        other = plain[own.turn]
        found = []
        for row, (text, baseline) in enumerate(zip(own.texts, other.texts, strict=True)):
            dtypes, ids = (own.dtype, other.dtype), own.batch[row].ids
            said = Said(own.method, dtypes, ids, row, text.tokens, baseline.tokens)
            if said not in known:
                known[said] = judge(said)
            found.append(known[said])
        before = worst.get((own.method, own.number), found)
        worst[own.method, own.number] = list(map(max, before, found))
    return worst


def _summary(
    task: str,
    samples: Sequence[Sample],
    plain: Mapping[tuple[int, int], Sample],
    program: Program,
    verdicts: Verdicts,
    temperature: float,
) -> Measurement:
    once = {sample.number: sample for sample in samples}.values()  # one run of each batch
    texts = [text for sample in once for text in sample.texts]
    num_new_tokens = sum(len(text.tokens) for text in texts)
    rounds = sum(text.rounds for text in texts)
    pairs = [(sample, plain[sample.turn]) for sample in samples]
    ratio, ratio_quartiles = _middle([_speed(own) / _speed(other) for own, other in pairs])
    passes = sum(sample.passes for sample in once)
    prefill = decode = overhead = overhead_quartiles = None
    if all(sample.prefill_seconds is not None for sample in samples):
        prefill = _total(samples, lambda sample: sample.prefill_seconds or 0.0)
        decode = _total(samples, lambda sample: sample.decode_seconds)
        overheads = [_round_seconds(own) / _round_seconds(other) for own, other in pairs]
        overhead, overhead_quartiles = _middle(overheads)
    seconds = _total(samples, lambda sample: sample.seconds)
    found = Counter(
        verdict for sample in once for verdict in verdicts[sample.method, sample.number]
    )
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
        is_compared=not found[Verdict.NOT_COMPARED],
        num_near_ties=found[Verdict.NEAR_TIE],
        num_different=found[Verdict.DIFFERENT],
        num_recompiled=sum(sample.num_compiled > 0 for sample in samples),
        compile_seconds=program.compile_seconds,
        is_cached=program.is_cached,
        peak_bytes=program.peak_bytes,
        temperature=temperature,
        batch=len(samples[0].batch),
    )


def _middle(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Median and quartiles."""
    low, middle, high = (float(value) for value in np.percentile(values, (25, 50, 75)))
    return middle, (low, high)


def _histogram(counts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The sum of all; empty if one of them is not told."""
    if not all(counts):
        return ()
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))


def _length_over_rounds(sample: Sample) -> float:
    """The length of the texts, summed over their rounds: they grow evenly."""
    return sum(
        (len(request.ids) + len(text.tokens) / 2) * text.rounds
        for request, text in zip(sample.batch, sample.texts, strict=True)
    )


def _total(samples: Sequence[Sample], read: Callable[[Sample], float]) -> float:
    """Of one run of every batch: the sum of the medians."""
    found: dict[int, list[float]] = {}
    for sample in samples:
        found.setdefault(sample.number, []).append(read(sample))
    return sum(map(median, found.values()))


def _speed(sample: Sample) -> float:
    return sample.num_tokens / sample.seconds


def _round_seconds(sample: Sample) -> float:
    return sample.decode_seconds / max(sample.passes, 1)


def _spread(samples: Sequence[Sample]) -> float | None:
    """How far the repeats of all batches lie apart; one that is not finished does not count."""
    found: dict[int, list[float]] = {}
    for sample in samples:
        found.setdefault(sample.repeat, []).append(sample.seconds)
    num_batches = len({sample.number for sample in samples})
    totals = [sum(seconds) for seconds in found.values() if len(seconds) == num_batches]
    return (max(totals) - min(totals)) / median(totals) if len(totals) > 1 else None
