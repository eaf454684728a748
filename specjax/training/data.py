"""Examples -> batches without end, whose position can be saved and restored.

Each epoch is a new order of all examples, decided by the seed. Two ways to fill the rows:

    padding   a row is one text, padded to the smallest of a few lengths; so few shapes are compiled
    packing   a row is filled with texts up to `longest`; segments keep them apart

A batch is a dict of B rows of T slots:

    tokens     int32, 0 in the padding
    is_answer  bool, the tokens to be learned
    segments   int32, 1 for the first text of a row and so on, 0 in the padding
    positions  int32, of each token within its text
"""

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PyTree

from specjax.core.errors import SpecjaxError
from specjax.training.config import AHEAD, DataOptions
from specjax.training.conversations import Complain, to_stderr
from specjax.training.examples import Example

PACKED_TOGETHER = 64  # rows filled at a time: more waste less, and take longer to restore

Batch = dict[str, np.ndarray]
Plan = list[tuple[np.ndarray, int]]  # of an epoch: the examples of each batch, and their length


@runtime_checkable
class Batches(Protocol):
    """Batches without end, and a position to go on from; states are JSON."""

    def __next__(self) -> PyTree: ...

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


def batches(
    examples: Sequence[Example],
    options: DataOptions,
    seed: int = 0,
    complain: Complain = to_stderr,
) -> Batches:
    """Batches of the examples, epoch after epoch; an iterator of Grain's.

    Every example comes once an epoch, but for those that teach nothing. Padded batches hold texts
    of one bucket; what does not fill a batch moves to the next longer bucket, and empty rows fill
    the last batch of an epoch. Packed batches run on from one epoch into the next.

    Args:
        examples: of at most `options.longest` tokens.
        options: how rows are filled.
        seed: decides the order, with the examples and their own order.
        complain: told how many examples teach nothing.

    Raises:
        SpecjaxError: if an example is too long, or none teaches anything.
    """
    longest = max((len(example.tokens) for example in examples), default=0)
    if longest > options.longest:
        raise SpecjaxError(
            f"an example has {longest} tokens, batches are for {options.longest}; tokenize it with "
            "that limit"
        )
    useful = [example for example in examples if teaches(example)]
    if not useful:
        raise SpecjaxError(
            f"none of {len(examples)} examples has an answer within {options.longest} tokens; give "
            "other data, or allow longer texts"
        )
    if len(useful) < len(examples):
        count = len(examples) - len(useful)
        complain(f"{count} of {len(examples)} examples are left out: no answer in what is kept")
    return (_packed if options.packing else _padded)(useful, options, seed)


def from_function(batch_at: Callable[[int], PyTree]) -> Batches:
    """The batches of a pure function of their number, from 0; an iterator of Grain's."""
    import grain

    numbers = grain.MapDataset.range(sys.maxsize)
    return iter(numbers.map(batch_at).to_iter_dataset(_in_this_thread(), allow_nones=True))


def teaches(example: Example) -> bool:
    """Whether any slot of the example counts (see `slot_mask`)."""
    return bool(np.any(example.is_answer[AHEAD:]))


def num_tokens(batch: Batch) -> int:
    """The tokens of a batch, without its padding."""
    return int(np.count_nonzero(batch["segments"]))


def slot_mask(
    is_answer: Bool[Array, "B T"], segments: Int[Array, "B T"], ahead: int = AHEAD
) -> Bool[Array, "B T"]:
    """Which slots count: those whose prediction, `ahead` tokens on, is an answer of their text."""
    missing = min(ahead, segments.shape[1])

    def later(values: Array) -> Array:
        return jnp.pad(values[:, ahead:], ((0, 0), (0, missing)))

    return later(is_answer) & (later(segments) == segments) & (segments > 0)


# ---- Rows of one text ----------------------------------------------------------------------------


def _padded(examples: Sequence[Example], options: DataOptions, seed: int) -> Batches:
    sizes = np.asarray([len(example.tokens) for example in examples])
    buckets = np.asarray(options.lengths())
    bucket_of = buckets[np.searchsorted(buckets, sizes)]

    @lru_cache(maxsize=1)
    def plan(epoch: int) -> Plan:
        return _plan(bucket_of, options.batch_size, np.random.default_rng((seed, epoch)))

    num_batches = len(plan(0))  # the same in every epoch

    def batch_at(number: int) -> Batch:
        epoch, number = divmod(number, num_batches)
        chosen, length = plan(epoch)[number]
        return _rows([examples[index] for index in chosen], options.batch_size, length)

    return from_function(batch_at)


def _plan(bucket_of: np.ndarray, batch_size: int, rng: np.random.Generator) -> Plan:
    """A random order of full batches, but for one, that hold every example once."""
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


def _rows(examples: Sequence[Example], batch_size: int, length: int) -> Batch:
    batch = _empty(batch_size, length)
    for row, example in enumerate(examples):
        size = len(example.tokens)
        batch["tokens"][row, :size] = example.tokens
        batch["is_answer"][row, :size] = example.is_answer
        batch["segments"][row, :size] = 1
        batch["positions"][row, :size] = np.arange(size)
    return batch


def _empty(batch_size: int, length: int) -> Batch:
    kinds = {"tokens": np.int32, "is_answer": bool, "segments": np.int32, "positions": np.int32}
    return {name: np.zeros((batch_size, length), kind) for name, kind in kinds.items()}


# ---- Rows of many texts --------------------------------------------------------------------------


def _packed(examples: Sequence[Example], options: DataOptions, seed: int) -> Batches:
    import grain

    texts = grain.MapDataset.source(examples).seed(seed).shuffle().repeat()
    rows = grain.experimental.FirstFitPackIterDataset(
        texts.map(_arrays).to_iter_dataset(_in_this_thread()),
        length_struct=dict.fromkeys(("tokens", "is_answer"), options.longest),
        num_packing_bins=PACKED_TOGETHER,
        seed=seed,
    )
    return iter(rows.map(_renamed).batch(options.batch_size))


def _arrays(example: Example) -> Batch:
    return {"tokens": example.tokens, "is_answer": example.is_answer}


def _renamed(row: Batch) -> Batch:
    """Grain numbers segments and positions for each array; ours agree."""
    return {
        "tokens": row["tokens"],
        "is_answer": row["is_answer"],
        "segments": row["tokens_segment_ids"],
        "positions": row["tokens_positions"],
    }


def _in_this_thread() -> Any:
    """Examples are in memory already: threads that read ahead would only stand in the way."""
    import grain

    return grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
