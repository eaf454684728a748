"""Prompt lookup against slow readings of the published algorithm, on many short random texts."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.settings import SettingError
from specjax.decoding import Context, Drafter, DraftTree, Draw, Outcome, Params, Prompt, Sampling
from specjax.decoding.drafter import Start
from specjax.decoding.drafters.prompt_lookup import EMPTY, PromptLookup
from specjax.decoding.sampling import sequence_keys
from specjax.decoding.tree import Verification, chain
from specjax.models.target import ModelOutput
from tests.decoding.test_head_trees import found_paths
from tests.decoding.tiny import target

MODEL = target()[0]
TEXTS, SLOTS, WIDTH = 600, 26, 4  # texts of at most SLOTS tokens, with states of size WIDTH


@cache
def texts() -> tuple[np.ndarray, np.ndarray]:
    """Random tokens from alphabets of 1 to 6, in the padding too, and lengths from 2 on."""
    numbers = np.random.default_rng(0)
    tokens = numbers.integers(0, 1 + np.arange(TEXTS)[:, None] % 6, (TEXTS, SLOTS))
    return tokens, numbers.integers(2, SLOTS + 1, TEXTS)


@partial(jax.jit, static_argnames="drafter")
def propose(drafter: Drafter, tokens, length, hidden=None, state=None) -> DraftTree:
    """The tree of a first round after these texts, whose states are `hidden [B, S, D]`.

    `state` is the drafter's, by default that of `init`.
    """
    params = Params(None)
    prefill = ModelOutput(logits=None, hidden=None if hidden is None else hidden[:, :, None])
    first = drafter.init(Start(MODEL, params, Prompt(tokens, length), prefill, SLOTS + 3, 0))
    state = first if state is None else state
    draw = Draw(sequence_keys(jax.random.key(0), len(tokens)), length, Sampling())
    return drafter.propose(MODEL, params, state, Context(tokens, length), draw)[0].tree


def assert_drafts(drafter: Drafter, reading, hidden=None, state=None) -> list[list[int]]:
    """The drafter must draft what `reading(text, states)` says, in each random text.

    `states` are `hidden`, or the drafter's own `state` of the first round.
    """
    tokens, length = texts()
    given = None if hidden is None else jnp.asarray(hidden)
    tree = propose(drafter, jnp.asarray(tokens), jnp.asarray(length), given, state)
    tree = jax.device_get(tree)
    assert tree.is_chain and tree.num_nodes == drafter.num_nodes == drafter.max_depth + 1
    counts = tree.valid.sum(axis=1)
    np.testing.assert_array_equal(tree.valid, np.arange(tree.num_nodes) < counts[:, None])
    expected = []
    for row in range(TEXTS):
        text = tokens[row, : length[row]].tolist()
        assert tree.tokens[row, 0] == text[-1]
        known = state if hidden is None else hidden
        expected.append(reading(text, None if known is None else known[row]))
        assert tree.tokens[row, 1 : counts[row]].tolist() == expected[-1]
    assert 20 < sum(draft == [] for draft in expected) < TEXTS - 20
    return expected


def one_with_a_continuation(drafter: PromptLookup, text: list[int], states=None) -> list[int]:
    """As our docstring says: the longest n-gram first, then the first or last occurrence of it."""
    length = len(text)
    least = 1 if drafter.allow_shorter else drafter.num_tokens
    for n in range(drafter.max_ngram, drafter.min_ngram - 1, -1):
        places = range(length - n - least + 1)
        for i in places if drafter.occurrence == "first" else reversed(places):
            if text[i : i + n] == text[max(length - n, 0) :]:
                is_long = length >= 5 and text[max(i + n - 5, 0) : i + n] == text[-5:]
                return text[i + n :][: max(drafter.num_tokens, drafter.max_tokens * is_long)]
    return []


@pytest.mark.parametrize(
    "drafter",
    [
        PromptLookup(2, 4, 2),
        PromptLookup(6, 5, 3, True),
        PromptLookup(7, 30, 1, True, "last"),
        PromptLookup(2, 8, 1, True, max_tokens=4),  # longer chains after a long match
    ],
)
def test_pld_drafts_one_occurrence_of_the_longest_ngram(drafter):
    """Golden traces show the published search."""
    expected = assert_drafts(drafter, partial(one_with_a_continuation, drafter))
    assert drafter.max_tokens == 0 or {2, 4} < {*map(len, expected)}


def test_pld_has_the_published_defaults_and_rejects_an_empty_range_of_ngrams():
    assert PromptLookup() == PromptLookup(10, 3, 1, False)
    with pytest.raises(SettingError) as error:
        PromptLookup(max_ngram=2, min_ngram=3)
    assert error.value.field == "min_ngram"


@pytest.mark.parametrize("allow_shorter", [False, True])
def test_guesses_extend_the_ngram_that_is_looked_up(allow_shorter):
    """Each is drafted with the continuation of the n-gram that would end with it."""
    drafter = PromptLookup(4, num_guesses=3, guess_length=3, allow_shorter=allow_shorter)
    tokens, length = texts()
    tokens, length = tokens[:200], np.minimum(length[:200], SLOTS - 1)
    guesses = np.stack([np.random.default_rng(row).permutation(7)[:3] for row in range(200)])
    guesses[0] = EMPTY
    draw = Draw(sequence_keys(jax.random.key(0), 200), jnp.asarray(length), Sampling())
    context = Context(jnp.asarray(tokens), jnp.asarray(length))
    propose = jax.jit(partial(drafter.propose, MODEL))
    (tree, _), _ = jax.device_get(propose(Params(None), jnp.asarray(guesses), context, draw))
    num_continued = 0
    for row in range(200):
        text = tokens[row, : length[row]].tolist()
        expected = {tuple(one_with_a_continuation(drafter, text))}
        short = replace(drafter, num_tokens=2)
        for guess in guesses[row][guesses[row] != EMPTY].tolist():
            behind = one_with_a_continuation(short, [*text, guess])
            num_continued += behind != []
            expected.add((guess, *behind))
        prefixes = {path[:end] for path in expected for end in range(1, len(path) + 1)}
        assert set(found_paths(tree, row)) == prefixes
    assert num_continued > 50


def test_guesses_are_the_likely_tokens_at_the_deepest_accepted_node_without_the_root():
    drafter, numbers = PromptLookup(3, num_guesses=2), np.random.default_rng(2)
    logits = jnp.asarray(numbers.normal(size=(2, 10, 7)), jnp.float32)
    tree = chain(jnp.array([1, 1]), jnp.ones((2, 9), int), jnp.array([9, 9]))
    path = jnp.array([[0, 4, 6, 0], [0, 3, 0, 0]])
    best = np.argsort(-np.asarray(logits), axis=-1)
    bonus = jnp.array([best[0, 6, 1], best[1, 3, 0]])  # drawn, and the most likely
    verification = Verification(path, jnp.array([2, 1]), bonus)
    context = Context(bonus[:, None], jnp.array([1, 1]))
    outcome = Outcome(tree, ModelOutput(logits), verification, context, jnp.array([0, 0]))
    update = jax.jit(drafter.update, static_argnums=0)
    found = update(MODEL, Params(None), jnp.full((2, 2), EMPTY), outcome)
    assert found.tolist() == [best[0, 6, [0, 2]].tolist(), best[1, 3, 1:3].tolist()]
