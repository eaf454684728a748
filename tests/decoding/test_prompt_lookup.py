"""Prompt lookup against slow readings of the published algorithms, on many short random texts."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.drafter import Context, Drafter, Params
from specjax.decoding.drafters.prompt_lookup import PromptLookup, PromptLookupPlus
from specjax.decoding.generate import _start
from specjax.decoding.prompt import Prompt
from specjax.decoding.request import check_request
from specjax.decoding.round import one_round
from specjax.decoding.sampling import Draw, Sampling, row_keys
from specjax.decoding.tree import DraftTree
from specjax.errors import SpecjaxError
from specjax.models.cache import KVCache
from specjax.models.outputs import ModelOutput, Taps
from specjax.models.rows import causal_rows
from tests.decoding.tiny import prompt, target

TEXTS, SLOTS, WIDTH = 600, 26, 4  # texts of at most SLOTS tokens, with states of size WIDTH


@cache
def texts() -> tuple[np.ndarray, np.ndarray]:
    """Random tokens from alphabets of 1 to 6, in the padding too, and lengths from 2 on."""
    numbers = np.random.default_rng(0)
    tokens = numbers.integers(0, 1 + np.arange(TEXTS)[:, None] % 6, (TEXTS, SLOTS))
    return tokens, numbers.integers(2, SLOTS + 1, TEXTS)


@partial(jax.jit, static_argnames="drafter")
def propose(drafter: Drafter, tokens, length, hidden=None) -> DraftTree:
    """The tree of a first round after these texts, whose states are `hidden [B, S, D]`."""
    seen = None if hidden is None else hidden[:, :, None]
    prefill = ModelOutput(logits=None, hidden=seen)
    state = drafter.init(Params(None), Prompt(tokens, length), prefill, SLOTS + 3)
    draw = Draw(row_keys(jax.random.key(0), len(tokens)), length, Sampling())
    return drafter.propose(Params(None), state, Context(tokens, length), draw)[0].tree


def drafts(tree: DraftTree) -> list[list[int]]:
    """The drafted tokens of each row."""
    assert tree.is_chain
    counts = np.asarray(tree.num_valid())
    np.testing.assert_array_equal(tree.valid, np.arange(tree.num_nodes) < counts[:, None])
    rows = zip(np.asarray(tree.tokens), counts, strict=True)
    return [row[1:count].tolist() for row, count in rows]


def compare(drafter: Drafter, reading, hidden=None):
    """The drafter must draft what `reading(text, states)` says, in each of the random texts."""
    tokens, length = texts()
    given = None if hidden is None else jnp.asarray(hidden)
    tree = propose(drafter, jnp.asarray(tokens), jnp.asarray(length), given)
    assert tree.num_nodes == drafter.num_nodes == drafter.max_depth + 1
    expected = []
    for row in range(TEXTS):
        text = tokens[row, : length[row]].tolist()
        assert tree.tokens[row, 0] == text[-1]
        expected.append(reading(text, None if hidden is None else hidden[row]))
    assert drafts(tree) == expected
    assert 20 < sum(draft == [] for draft in expected) < TEXTS - 20


# ---- PLD ---------------------------------------------------------------------------------------


def published(drafter: PromptLookup, text: list[int], states=None) -> list[int]:
    """The published loop, word for word."""
    length, count = len(text), drafter.num_tokens
    for n in range(drafter.max_ngram, drafter.min_ngram - 1, -1):
        for i in range(length - n + 1):
            has_all = i + n + count <= length and i + n < length - n
            if text[i : i + n] == text[length - n :] and has_all:
                return text[i + n : i + n + count]
    return []


def first_with_a_continuation(drafter: PromptLookup, text: list[int], states=None) -> list[int]:
    """As our docstring says: the longest n-gram first, then the first occurrence of it."""
    length = len(text)
    least = 1 if drafter.allow_shorter else drafter.num_tokens
    for n in range(drafter.max_ngram, drafter.min_ngram - 1, -1):
        for i in range(length - n - least + 1):
            if text[i : i + n] == text[max(length - n, 0) :]:
                return text[i + n : i + n + drafter.num_tokens]
    return []


@pytest.mark.parametrize(
    "settings",
    [(10, 3, 1), (4, 3, 1), (5, 4, 2), (7, 2, 2), (3, 1, 1)],
    ids=lambda settings: "tokens={},ngrams={}..{}".format(*settings),
)
def test_pld_drafts_what_the_published_algorithm_drafts(settings):
    drafter = PromptLookup(*settings)
    compare(drafter, partial(published, drafter))


@pytest.mark.parametrize("settings", [(1, 3, 1), (2, 4, 2)])
def test_pld_of_few_tokens_drafts_the_first_occurrence_of_the_longest_ngram(settings):
    drafter = PromptLookup(*settings)
    compare(drafter, partial(first_with_a_continuation, drafter))


@pytest.mark.parametrize("settings", [(10, 3, 1), (2, 3, 2), (6, 5, 3)])
def test_pld_that_allows_shorter_drafts_goes_on_to_the_end_of_the_text(settings):
    drafter = PromptLookup(*settings, allow_shorter=True)
    compare(drafter, partial(first_with_a_continuation, drafter))


def test_pld_defaults_are_those_published():
    assert PromptLookup() == PromptLookup(10, 3, 1, False)
    assert PromptLookup().num_probes == 0


@pytest.mark.parametrize("settings", [(0, 3, 1), (-1, 3, 1), (5, 0, 0), (5, 2, 3), (5, 3, 0)])
def test_pld_refuses_settings_that_draft_nothing(settings):
    with pytest.raises(SpecjaxError, match=r"must be at least 1|use 1 <= min_ngram <= max_ngram"):
        PromptLookup(*settings)


# ---- PLD+ --------------------------------------------------------------------------------------


def equation_2(drafter: PromptLookupPlus, text: list[int], states: np.ndarray) -> list[int]:
    """The occurrence of the root whose preceding state is most like the one before the root."""
    states = states.astype(np.float64)
    states = states / np.linalg.norm(states, axis=-1, keepdims=True)
    root = len(text) - 1
    candidates = [j for j in range(1, root) if text[j] == text[root]]
    likeness = [states[j - 1] @ states[root - 1] for j in candidates]
    if not candidates or max(likeness) < drafter.min_similarity:
        return []
    best = candidates[int(np.argmax(likeness))]
    return text[best + 1 : best + 1 + drafter.num_tokens]


@pytest.mark.parametrize("min_similarity", [-1.0, 0.4])
@pytest.mark.parametrize("num_tokens", [3, 40])
def test_pld_plus_drafts_what_equation_2_says(num_tokens, min_similarity):
    numbers = np.random.default_rng(1)
    states = numbers.normal(size=(TEXTS, SLOTS, WIDTH)) * numbers.uniform(0.1, 9, (SLOTS, 1))
    drafter = PromptLookupPlus(1, num_tokens, min_similarity)
    compare(drafter, partial(equation_2, drafter), states.astype(np.float32))


def test_pld_takes_the_first_occurrence_where_pld_plus_takes_the_like_one():
    # Two definitions of 9, one after a 1 and one after a 3; the text ends in 9 after a 5.
    text = jnp.array([[1, 9, 2, 2, 2, 3, 9, 4, 4, 4, 5, 9]])
    length = jnp.array([12])
    states = np.eye(6)[np.asarray(text) % 6]
    states[0, 10] = 2.0 * states[0, 5] + 0.5 * states[0, 0]  # the 5 means much the same as the 3
    hidden = jnp.asarray(states, jnp.float32)
    assert drafts(propose(PromptLookup(3), text, length)) == [[2, 2, 2]]
    assert drafts(propose(PromptLookupPlus(0, 3), text, length, hidden)) == [[4, 4, 4]]
    strict = PromptLookupPlus(0, 3, min_similarity=0.99)
    assert drafts(propose(strict, text, length, hidden)) == [[]]


@pytest.mark.parametrize("min_similarity", [-1.1, 1.01, float("nan")])
def test_pld_plus_refuses_a_similarity_that_no_cosine_has(min_similarity):
    with pytest.raises(
        SpecjaxError, match=rf"min_similarity {min_similarity} is outside \[-1, 1\]"
    ):
        PromptLookupPlus(min_similarity=min_similarity)


@pytest.mark.parametrize("layer", [1, 2])
def test_pld_plus_remembers_the_states_of_a_pass_over_the_committed_text(layer):
    model, params = target()
    drafter = PromptLookupPlus(layer, num_tokens=5)
    settings = {"target": model, "drafter": drafter, "max_new_tokens": 40}
    state = _start(Params(params), prompt(3), jax.random.key(0), **settings)
    advance = jax.jit(
        lambda state: one_round(Params(params), state, sampling=Sampling(), eos=(), **settings)
    )
    for _ in range(12):
        state = advance(state)
    assert (state.stats.accepted_lengths[:, 3:].sum(axis=1) > 0).any(), "no path was long"
    rows = causal_rows(state.tokens, jnp.zeros((3,), jnp.int32))
    cache = KVCache.create(model.config, *state.tokens.shape)
    taps = Taps(hidden_layers=(layer,), logits=False)
    output, _ = jax.jit(model.apply, static_argnums=3)({"params": params}, rows, cache, taps)
    expected = output.hidden[:, :, 0]
    expected = expected / jnp.linalg.norm(expected, axis=-1, keepdims=True)
    for row in range(3):
        count = int(state.length[row]) - 1  # the root's is not known yet
        found = state.drafter.states[row, :count]
        np.testing.assert_allclose(found, expected[row, :count], atol=1e-5)


@pytest.mark.parametrize("layer", [-1, 3, 9])
def test_pld_plus_refuses_a_layer_that_the_target_lacks(layer):
    model, params = target()
    drafter = PromptLookupPlus(layer)
    message = f"hidden layer {layer} does not exist: the model has layers 0 to 2"
    with pytest.raises(SpecjaxError, match=message):
        check_request(Params(params), prompt(1), model, drafter, max_new_tokens=4)


@pytest.mark.parametrize("layers, expected", [(1, 1), (2, 1), (4, 1), (16, 4), (32, 9), (80, 22)])
def test_pld_plus_takes_a_layer_as_deep_as_the_papers(layers, expected):
    model, _ = target()
    config = type(model.config)(**vars(model.config) | {"num_hidden_layers": layers})
    assert PromptLookupPlus.layer_for(config) == expected
