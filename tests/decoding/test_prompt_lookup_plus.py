"""PLD+ against slow readings of equations 2 and 3, and what it remembers of the target."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.decoding.drafter import Params
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.drafters.prompt_lookup_plus import (
    PromptLookupPlus,
    PromptLookupPlusAttention,
)
from specjax.decoding.generate import start_loop
from specjax.decoding.request import check_request
from specjax.decoding.round import one_round
from specjax.decoding.sampling import Sampling
from specjax.models.cache import KVCache
from specjax.models.target import Taps, causal_rows
from tests.decoding.lookup import SLOTS, TEXTS, WIDTH, compare, drafts, propose, texts
from tests.decoding.tiny import prompt, target


def equation_3(drafter: PromptLookupPlus, text: list[int], states: np.ndarray) -> list[int]:
    """The occurrence of the root whose preceding states are most like those before the root."""
    root = len(text) - 1
    m = drafter.prefix_length
    states = states.astype(np.float64)
    means = np.array([states[max(0, t - m + 1) : t + 1].sum(axis=0) for t in range(root)])
    means = means / np.linalg.norm(means, axis=-1, keepdims=True)
    candidates = [j for j in range(1, root) if text[j] == text[root]]
    likeness = [means[j - 1] @ means[root - 1] for j in candidates]
    if not candidates or max(likeness) < drafter.min_similarity:
        return []
    best = candidates[int(np.argmax(likeness))]
    return text[best + 1 : best + 1 + drafter.num_tokens]


@pytest.mark.parametrize("prefix_length", [1, 3])
@pytest.mark.parametrize("min_similarity", [-1.0, 0.4])
@pytest.mark.parametrize("num_tokens", [3, 40])
def test_hidden_states_rank_as_equation_3_says(num_tokens, min_similarity, prefix_length):
    numbers = np.random.default_rng(1)
    states = numbers.normal(size=(TEXTS, SLOTS, WIDTH)) * numbers.uniform(0.1, 9, (SLOTS, 1))
    drafter = PromptLookupPlus(
        num_tokens, layer=1, min_similarity=min_similarity, prefix_length=prefix_length
    )
    compare(drafter, partial(equation_3, drafter), states.astype(np.float32))


def equation_2(drafter, text: list[int], _, weights: np.ndarray, prompt_length: int) -> list[int]:
    """The occurrence of the root that is looked at most, in the whole text or in the prompt."""
    root = len(text) - 1
    end = min(root, prompt_length) if drafter.candidates == "prompt" else root
    candidates = [j for j in range(1, end) if text[j] == text[root]]
    if not candidates:
        return []
    best = max(candidates, key=lambda j: (weights[j], -j))
    return text[best + 1 : best + 1 + drafter.num_tokens]


@pytest.mark.parametrize("candidates", ["text", "prompt"])
@pytest.mark.parametrize("num_tokens", [3, 40])
def test_attention_ranks_as_equation_2_says(num_tokens, candidates):
    numbers = np.random.default_rng(2)
    weights = numbers.uniform(size=(TEXTS, SLOTS + 3)).astype(np.float32)
    prompt_length = numbers.integers(2, 1 + texts()[1])
    drafter = PromptLookupPlusAttention(num_tokens, candidates, heads=((0, 0),))
    reading = partial(equation_2, drafter)
    compare(drafter, reading, weights=weights, prompt_length=prompt_length)


def test_pld_takes_the_first_occurrence_where_pld_plus_takes_the_like_one():
    # Two definitions of 9, one after a 1 and one after a 3; the text ends in 9 after a 5.
    text = jnp.array([[1, 9, 2, 2, 2, 3, 9, 4, 4, 4, 5, 9]])
    length = jnp.array([12])
    states = np.eye(6)[np.asarray(text) % 6]
    states[0, 10] = 2.0 * states[0, 5] + 0.5 * states[0, 0]  # the 5 means much the same as the 3
    hidden = jnp.asarray(states, jnp.float32)
    assert drafts(propose(PromptLookup(3), text, length)) == [[2, 2, 2]]
    assert drafts(propose(PromptLookupPlus(3, layer=0), text, length, hidden)) == [[4, 4, 4]]
    strict = PromptLookupPlus(3, layer=0, min_similarity=0.99)
    assert drafts(propose(strict, text, length, hidden)) == [[]]


@pytest.mark.parametrize("min_similarity", [-1.1, 1.01, float("nan")])
def test_pld_plus_refuses_a_similarity_that_no_cosine_has(min_similarity):
    with pytest.raises(
        SpecjaxError, match=rf"min_similarity {min_similarity} is outside \[-1, 1\]"
    ):
        PromptLookupPlus(min_similarity=min_similarity)


def after_rounds(drafter, count: int, taps: Taps):
    """The loop's state after `count` rounds of three texts, and a plain pass over what they say."""
    model, params = target()
    settings = {"target": model, "drafter": drafter, "max_new_tokens": 80}
    state = start_loop(Params(params), prompt(3), jax.random.key(0), **settings)
    advance = jax.jit(
        lambda state: one_round(Params(params), state, sampling=Sampling(), eos=(), **settings)
    )
    for _ in range(count):
        state = advance(state)
    rows = causal_rows(state.tokens, jnp.zeros((3,), jnp.int32))
    cache = KVCache.create(model.config, *state.tokens.shape)
    output, _ = jax.jit(model.run, static_argnums=3)(params, rows, cache, taps)
    return state, output


def has_long_path(state) -> bool:
    return bool(state.stats.accepted_lengths[:, 3:].any())


@pytest.mark.parametrize("layer, prefix_length", [(1, 1), (2, 1), (1, 3)])
def test_pld_plus_remembers_the_states_of_a_pass_over_the_committed_text(layer, prefix_length):
    drafter = PromptLookupPlus(layer=layer, num_tokens=5, prefix_length=prefix_length)
    state, output = after_rounds(drafter, 12, Taps(hidden_layers=(layer,), logits=False))
    assert has_long_path(state)
    expected = np.asarray(output.hidden[:, :, 0])
    expected = sum(
        np.pad(expected, ((0, 0), (back, 0), (0, 0)))[:, : expected.shape[1]]
        for back in range(prefix_length)
    )
    expected = expected / np.linalg.norm(expected, axis=-1, keepdims=True)
    for row in range(3):
        count = int(state.length[row]) - 1  # the root's is not known yet
        found = state.drafter.states[row, :count]
        np.testing.assert_allclose(found, expected[row, :count], atol=1e-5)


@pytest.mark.parametrize("layer", [-1, 3, 9])
def test_pld_plus_refuses_a_layer_that_the_target_lacks(layer):
    model, params = target()
    drafter = PromptLookupPlus(layer=layer)
    message = f"hidden layer {layer} does not exist: the model has layers 0 to 2"
    with pytest.raises(SpecjaxError, match=message):
        check_request(Params(params), prompt(1), model, drafter, max_new_tokens=4)


@pytest.mark.parametrize("layers, expected", [(1, 1), (2, 1), (4, 1), (16, 4), (32, 9), (80, 22)])
def test_pld_plus_takes_a_layer_as_deep_as_the_papers(layers, expected):
    model, _ = target()
    config = type(model.config)(**vars(model.config) | {"num_hidden_layers": layers})
    assert PromptLookupPlus.layer_for(config) == expected


# ---- PLD+ (a) ----------------------------------------------------------------------------------

HEADS = ((0, 1), (1, 0), (1, 3))


@pytest.mark.parametrize("aggregate", ["max", "sum"])
@pytest.mark.parametrize("rounds", [1, 5, 25])
def test_attention_is_that_of_the_token_before_the_root(aggregate, rounds):
    drafter = PromptLookupPlusAttention(num_tokens=5, heads=HEADS, aggregate=aggregate)
    state, output = after_rounds(drafter, rounds, Taps(attention_heads=HEADS, logits=False))
    assert has_long_path(state) == (rounds == 25)
    combine = {"max": np.max, "sum": np.sum}[aggregate]
    expected = combine(np.asarray(output.attention), axis=1)
    for row in range(3):
        count = int(state.length[row]) - 1
        found = state.drafter.weights[row, :count]
        np.testing.assert_allclose(found, expected[row, count - 1, :count], atol=1e-5)


def test_heads_of_a_layer_stand_in_for_induction_heads():
    model, _ = target()
    heads = PromptLookupPlusAttention.heads_for(model.config)
    assert heads == tuple((1, head) for head in range(model.config.num_attention_heads))
    assert PromptLookupPlusAttention.heads_for(model.config, 0)[0] == (0, 0)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"heads": ((2, 0),)}, r"attention head \(layer 2, head 0\) does not exist"),
        ({"heads": ((0, 9),)}, r"attention head \(layer 0, head 9\) does not exist"),
        ({"heads": ()}, "no heads are chosen"),
        ({"aggregate": "mean"}, "aggregate 'mean' is unknown"),
        ({"candidates": "output"}, "candidates 'output' are unknown"),
        ({"num_tokens": 0}, "num_tokens 0 must be at least 1"),
    ],
)
def test_pld_plus_attention_refuses_what_cannot_be(settings, message):
    model, params = target()
    with pytest.raises(SpecjaxError, match=message):
        drafter = PromptLookupPlusAttention(**settings)
        check_request(Params(params), prompt(1), model, drafter, max_new_tokens=4)
