"""Batches: nothing lost, nothing mixed, the same again from a saved position."""

import itertools
import json
from collections.abc import Iterator

import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.core.settings import SettingError
from specjax.training.data import DataOptions, batches, teaches
from specjax.training.examples import Example

PADDED = DataOptions(batch_size=4, longest=40, buckets=(8, 16, 40))
PACKED = DataOptions(batch_size=2, longest=40, packing=True)
SEED = 3
MODES = pytest.mark.parametrize("options", [PADDED, PACKED], ids=["padded", "packed"])


def examples() -> Iterator[Example]:
    """Texts of all lengths; token n of text k is 1000 (k + 1) + n, an answer for some n."""
    rng = np.random.default_rng(0)
    for number in range(30):
        size = int(rng.integers(3, 41))
        is_answer = rng.random(size) < 0.5
        is_answer[-1] = True
        yield Example(1000 * (number + 1) + np.arange(size, dtype=np.int32), is_answer)


EXAMPLES = list(examples())
DTYPES = {"tokens": "int32", "is_answer": "bool", "segments": "int32", "positions": "int32"}


def texts_in(batch) -> list[int]:
    """The numbers of the texts in a batch, which must be there whole and unmixed."""
    assert {name: str(values.dtype) for name, values in batch.items()} == DTYPES
    found = []
    for row in range(len(batch["tokens"])):
        segments = batch["segments"][row]
        assert not np.any(np.diff(segments[segments > 0]) < 0)
        for segment in range(1, segments.max() + 1):
            where = np.flatnonzero(segments == segment)
            assert np.array_equal(where, np.arange(where[0], where[-1] + 1))
            number = int(batch["tokens"][row, where[0]]) // 1000 - 1
            assert np.array_equal(batch["tokens"][row, where], EXAMPLES[number].tokens)
            assert np.array_equal(batch["is_answer"][row, where], EXAMPLES[number].is_answer)
            assert np.array_equal(batch["positions"][row, where], np.arange(len(where)))
            found.append(number)
        assert not any(np.any(values[row, segments == 0]) for values in batch.values())
    return found


def equal(one, other) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


def take(iterator, count: int) -> list:
    return list(itertools.islice(iterator, count))


@pytest.mark.parametrize("batch_size", [1, 7, 40])
def test_padded_epochs_hold_every_text_once_in_a_new_order(batch_size):
    options = DataOptions(batch_size=batch_size, longest=40, buckets=PADDED.buckets)
    iterator, per_epoch = batches(EXAMPLES, options, SEED), -(-len(EXAMPLES) // batch_size)
    epochs = []
    for _ in range(3):
        found = [texts_in(batch) for batch in take(iterator, per_epoch)]
        assert sum(len(each) < batch_size for each in found) <= 1  # all are full but for one
        epochs.append(list(itertools.chain.from_iterable(found)))
        assert sorted(epochs[-1]) == list(range(len(EXAMPLES)))
    assert len(set(map(tuple, epochs))) == 3


def test_packing_loses_no_text_and_leaves_little_padding():
    """Whole groups of packed sequences are whole stretches of the epochs."""
    iterator, found = batches(EXAMPLES, PACKED, SEED), []
    for number in range(1, 130):
        found += texts_in(next(iterator))
        if number % 32 == 0:  # 64 rows
            counts = np.bincount(found, minlength=len(EXAMPLES))
            assert counts.max() - counts.min() <= 1
    used = [np.count_nonzero(batch["segments"]) for batch in take(iterator, 60)]
    assert np.mean(used) > 0.8 * PACKED.batch_size * PACKED.longest


@MODES
def test_a_seed_and_a_position_decide_all_further_batches(options):
    """An epoch has 8 padded batches, and fills 10 packed ones or so; 32 are packed together."""
    iterator, positions, whole = batches(EXAMPLES, options, SEED), [], []
    for _ in range(45):
        positions.append(json.dumps(iterator.get_state()))  # only JSON crosses processes
        whole.append(next(iterator))
    shapes = {(options.batch_size, length) for length in options.lengths()}
    assert {batch["tokens"].shape for batch in whole} == shapes
    for count in (0, 8, 33):
        fresh = batches(EXAMPLES, options, SEED)
        for each in (fresh, iterator):  # forth and back
            each.set_state(json.loads(positions[count]))
            assert all(map(equal, whole[count:], take(each, 45 - count)))
    assert not all(map(equal, whole, take(batches(EXAMPLES, options, SEED + 1), 20)))


def test_texts_that_teach_nothing_are_skipped_and_counted(capsys):
    def example(*is_answer: bool) -> Example:
        return Example(np.arange(len(is_answer), dtype=np.int32), np.array(is_answer, bool))

    useless = [example(), example(True, True), example(True, True, False, False)]
    useful = [example(False, False, True), example(True, True, True, False)]
    assert [teaches(example) for example in (*useless, *useful)] == [False] * 3 + [True] * 2
    (batch,) = take(batches([*useless, *useful], PADDED), 1)
    assert capsys.readouterr().err == (
        "specjax: skipped 3 of 5 examples: they are too short, or truncation at --longest left no "
        "assistant text\n"
    )
    assert sorted(batch["segments"].sum(axis=1)) == [0, 0, 3, 4]
    for none in (useless, []):
        message = f"none of {len(none)} examples has assistant text within 40"
        with pytest.raises(SpecjaxError, match=message):
            batches(none, PADDED)


def test_a_text_that_is_too_long_is_rejected():
    with pytest.raises(SpecjaxError, match="an example has 40 tokens, but batches hold 39"):
        batches([Example(np.zeros(40, np.int32), np.ones(40, bool))], DataOptions(longest=39))


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        (DataOptions(), (64, 128, 256, 512, 1024, 2048)),
        (DataOptions(longest=200), (64, 128, 200)),
        (DataOptions(longest=10), (10,)),
        (DataOptions(longest=200, packing=True), (200,)),
        (DataOptions(longest=200, buckets=(50, 200)), (50, 200)),
    ],
)
def test_texts_are_padded_to_powers_of_two_or_to_the_given_lengths(options, lengths):
    assert options.lengths() == lengths


@pytest.mark.parametrize(
    "changes",
    [
        {"packing": True, "buckets": (64, 2048)},
        {"buckets": (128, 64, 2048)},
        {"buckets": (64, 1024)},
    ],
)
def test_lengths_ascend_to_the_longest_and_packing_has_one(changes):
    with pytest.raises(SettingError) as caught:
        DataOptions(**changes)
    assert caught.value.field == "buckets"
