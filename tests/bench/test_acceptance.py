"""Acceptance, against a literal count over the rounds of one prompt at a time."""

import jax
import numpy as np
import pytest

from specjax.bench.acceptance import BATCH, Acceptance, acceptance, advice
from specjax.decoding.drafter import Params
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.generate import stream
from specjax.decoding.prompt import BUCKET, from_ids
from specjax.decoding.sampling import Sampling
from specjax.loading.targets import LoadedTarget
from tests.loading.tiny import tiny

DRAFTER = PromptLookup(num_tokens=4)
SAMPLING = Sampling(temperature=0.7)
NEW = 30
VOCABULARY = 8  # small, so that lookup is sometimes right


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return tiny(vocab_size=VOCABULARY)


def prompts(count: int) -> list[list[int]]:
    """Ragged, the longest first, and so repetitive that lookup finds something."""
    rng = np.random.default_rng(3)
    pieces = [rng.integers(0, VOCABULARY, 5).tolist() * 3 for _ in range(count)]
    return [piece[: 15 - number] for number, piece in enumerate(pieces)]


def committed(target: LoadedTarget, prompt: list[int], row: int, seed: int):
    """Counts the tokens that each round adds to this prompt, as sequence `row` of its batch."""
    rows = from_ids([prompt] * BATCH, BUCKET)  # of one shape with what is tested
    lengths = [0]
    for generation in stream(
        Params(target.params),
        rows,
        jax.random.key(seed),
        target=target.model,
        drafter=DRAFTER,
        sampling=SAMPLING,
        max_new_tokens=NEW,
        eos=target.eos,
        rounds_per_call=1,
    ):
        lengths.append(int(generation.length[row]))
    return [added for added in np.diff(lengths).tolist() if added]  # a finished sequence adds none


def literal_rates(rounds: list[int]) -> list[float]:
    """At each depth: of the rounds that came so far, the share that came further."""
    rates = []
    for depth in range(1, DRAFTER.max_depth + 1):
        tried = [added for added in rounds if added >= depth]
        if tried:
            rates.append(sum(added >= depth + 1 for added in tried) / len(tried))
    return rates


def test_counts_are_those_of_all_rounds(target):
    """The prompts are fewer than a batch holds; the sequences that fill it do not count."""
    batch = sorted(prompts(3), key=len)
    rounds = [n for row, prompt in enumerate(batch) for n in committed(target, prompt, row, 5)]
    measured = acceptance(target, DRAFTER, None, batch, SAMPLING, max_new_tokens=NEW, seed=5)
    assert measured.counts == tuple(np.bincount(rounds, minlength=DRAFTER.max_depth + 2).tolist())
    assert sum(number * count for number, count in enumerate(measured.counts)) == 3 * NEW
    assert measured.accepted_length == pytest.approx(3 * NEW / len(rounds), abs=1e-12)
    assert measured.accepted_length > 1  # something was accepted
    assert measured.rates == pytest.approx(literal_rates(rounds), abs=1e-12)


def test_prompts_beyond_one_batch_count_as_well(target):
    batch = sorted(prompts(BATCH + 2), key=len)

    def counts(part, seed):
        return acceptance(target, DRAFTER, None, part, SAMPLING, NEW, seed).counts

    first, second = counts(batch[:BATCH], 0), counts(batch[BATCH:], BATCH)
    assert counts(batch, 0) == tuple(np.add(first, second).tolist())


def test_a_depth_that_was_never_tried_has_no_rate():
    assert Acceptance((0, 10, 0, 0)).rates == [0.0]
    nothing = Acceptance((0, 0, 0, 0))
    assert (nothing.accepted_length, nothing.rates) == (0.0, [])


def test_the_advice_names_the_causes():
    assert advice(1.02, 63) == advice(1.1, 640) == ""  # too few rounds, and enough accepted
    warning = advice(1.02, 70)
    assert "\n" not in warning
    for word in ("1.02", "70 rounds", "target", "tokenizer", "chat template", "weights"):
        assert word in warning
