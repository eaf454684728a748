"""Turns examples into endless batches whose position can be saved and restored.

Each epoch goes through all examples in a new order, which the seed decides. Sequences are made by

    padding   one text each, padded to the smallest of a few lengths, so few shapes are compiled
    packing   texts that add up to at most `longest` tokens, separated by segments

A batch is a dict of B sequences of T slots:

    tokens     int32, 0 in the padding
    is_answer  bool, marks the tokens to learn
    segments   int32, numbers the texts of a sequence from 1, 0 in the padding
    positions  int32, of each token within its text
    hidden     `[B, T, F]`, the target's hidden states, if the examples have them
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PyTree

from specjax.core.errors import SpecjaxError, warn
from specjax.core.settings import SettingError, check_fields, setting
from specjax.training.examples import Example

AHEAD = 2  # slot t of an EAGLE head has feature t and token t + 1, and predicts token t + 2
MIN_BUCKET = 64
PACKED_TOGETHER = 64  # sequences: more need less padding, but more time to restore

NumpyBatch = dict[str, np.ndarray]
Plan = list[tuple[np.ndarray, int]]  # of an epoch: the examples of each batch, and their length


@dataclass(frozen=True)
class DataOptions:
    """Size, lengths and packing of batches."""

    batch_size: int = setting(8, at_least=1)
    """Sequences of a batch."""
    longest: int = setting(2048, above=AHEAD)
    """Tokens of the longest text, and of each sequence if texts are packed."""
    packing: bool = False
    """Pack several texts into a sequence; they do not attend to each other."""
    buckets: tuple[int, ...] = setting((), at_least=1)
    """Lengths that texts are padded to; by default powers of two up to the longest."""

    def __post_init__(self):
        check_fields(self)
        if self.buckets and self.packing:
            raise SettingError("buckets", "must be empty with packing, where all have one length")
        if self.buckets and list(self.buckets) != sorted({*self.buckets, self.longest}):
            raise SettingError(
                "buckets", f"must grow and end with the longest length, {self.longest}"
            )

    def lengths(self) -> tuple[int, ...]:
        """Returns the lengths of sequences, in growing order."""
        if self.packing:
            return (self.longest,)
        powers = (2**power for power in range(self.longest.bit_length()))
        inner = (length for length in powers if MIN_BUCKET <= length < self.longest)
        return self.buckets or (*inner, self.longest)


@runtime_checkable
class Batches(Protocol):
    """Endless batches, and a position to resume from; states are JSON."""

    def __next__(self) -> PyTree: ...

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


def batches(examples: Sequence[Example], options: DataOptions, seed: int = 0) -> Batches:
    """Returns Grain's iterator over batches of the examples, epoch after epoch.

    Every example comes once an epoch, except for those that teach nothing. Padded batches hold
    texts of one bucket; texts that do not fill a batch move to the next longer bucket, and empty
    sequences pad the last batch of an epoch. Packed batches run from one epoch into the next.
    """
    longest = max((len(example.tokens) for example in examples), default=0)
    if longest > options.longest:
        raise SpecjaxError(
            f"an example has {longest} tokens, but batches hold {options.longest}; tokenize it "
            "with that limit"
        )
    useful = [example for example in examples if teaches(example)]
    if not useful:
        raise SpecjaxError(
            f"none of {len(examples)} examples has assistant text within {options.longest} "
            "tokens; give other data, or raise --longest"
        )
    if len(useful) < len(examples):
        warn(
            f"skipped {len(examples) - len(useful)} of {len(examples)} examples: they are too "
            "short, or truncation at --longest left no assistant text"
        )
    return (_packed if options.packing else _padded)(useful, options, seed)


def from_function(batch_at: Callable[[int], PyTree]) -> Batches:
    """Returns Grain's iterator over `batch_at(0)`, `batch_at(1)` and so on; it must be pure."""
    import grain

    numbers = grain.MapDataset.range(sys.maxsize)
    return iter(numbers.map(batch_at).to_iter_dataset(_in_this_thread(), allow_nones=True))


def teaches(example: Example) -> bool:
    """Whether any slot of the example counts (see `slot_mask`)."""
    return bool(np.any(example.is_answer[AHEAD:]))


def slot_mask(
    is_answer: Bool[Array, "B T"], segments: Int[Array, "B T"], ahead: int = AHEAD
) -> Bool[Array, "B T"]:
    """Marks the slots that count: the token `ahead` of them belongs to an answer of their text."""

    def later(values: Array) -> Array:
        return jnp.pad(values, ((0, 0), (0, ahead)))[:, ahead:]

    return later(is_answer) & (later(segments) == segments) & (segments > 0)


# ---- Padding: one text per sequence --------------------------------------------------------------


def _padded(examples: Sequence[Example], options: DataOptions, seed: int) -> Batches:
    sizes = np.asarray([len(example.tokens) for example in examples])
    buckets = np.asarray(options.lengths())
    bucket_of = buckets[np.searchsorted(buckets, sizes)]

    @lru_cache(maxsize=1)
    def plan(epoch: int) -> Plan:
        return _plan(bucket_of, options.batch_size, np.random.default_rng((seed, epoch)))

    num_batches = len(plan(0))  # the same in every epoch

    def batch_at(number: int) -> NumpyBatch:
        epoch, number = divmod(number, num_batches)
        chosen, length = plan(epoch)[number]
        return padded_batch([examples[index] for index in chosen], options.batch_size, length)

    return from_function(batch_at)


def _plan(bucket_of: np.ndarray, batch_size: int, rng: np.random.Generator) -> Plan:
    """Returns batches in random order that hold every example once; all but one are full."""
    order = rng.permutation(len(bucket_of))
    plan, waiting = [], order[:0]
    for length in np.unique(bucket_of):
        waiting = np.concatenate([waiting, order[bucket_of[order] == length]])
        num_full = len(waiting) // batch_size
        full, waiting = np.split(waiting, [num_full * batch_size])
        plan += [(chosen, int(length)) for chosen in full.reshape(num_full, batch_size)]
    if waiting.size:
        plan.append((waiting, int(bucket_of.max())))
    return [plan[index] for index in rng.permutation(len(plan))]


def padded_batch(examples: Sequence[Example], batch_size: int, length: int) -> NumpyBatch:
    """Returns a batch of texts, padded to `length` tokens, and with empty sequences."""

    def values_of(example: Example) -> dict[str, np.ndarray]:
        positions = np.arange(len(example.tokens), dtype=np.int32)
        return example.arrays | {"segments": np.ones_like(positions), "positions": positions}

    batch = {
        name: np.zeros((batch_size, length, *values.shape[1:]), values.dtype)
        for name, values in values_of(examples[0]).items()
    }
    for index, example in enumerate(examples):
        for name, values in values_of(example).items():
            batch[name][index, : len(values)] = values
    return batch


# ---- Packing: many texts per sequence ------------------------------------------------------------


def _packed(examples: Sequence[Example], options: DataOptions, seed: int) -> Batches:
    import grain

    texts = grain.MapDataset.source(examples).seed(seed).shuffle().repeat()
    sequences = grain.experimental.FirstFitPackIterDataset(
        texts.map(lambda example: example.arrays).to_iter_dataset(_in_this_thread()),
        length_struct=dict.fromkeys(examples[0].arrays, options.longest),
        num_packing_bins=PACKED_TOGETHER,
        seed=seed,
    )
    return iter(sequences.map(_rename).batch(options.batch_size))


def _rename(sequence: NumpyBatch) -> NumpyBatch:
    """Takes the segments and positions of the tokens; Grain gives every array the same."""
    places = {"segments": "tokens_segment_ids", "positions": "tokens_positions"}
    arrays = {name: name for name in ("tokens", "is_answer", "hidden") if name in sequence}
    return {name: sequence[source] for name, source in (arrays | places).items()}


def _in_this_thread() -> Any:
    """Reads without threads: examples are in memory, or mapped into it."""
    import grain

    return grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
