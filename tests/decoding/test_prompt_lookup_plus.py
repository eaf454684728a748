"""PLD+ against slow readings of equations 2 and 3, and what it remembers of the target."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import Engine, Params
from specjax.decoding.drafters.prompt_lookup_plus import PromptLookupPlus, PromptLookupPlusAttention
from specjax.models.target import Taps
from tests.decoding.contract import assert_params_rejected
from tests.decoding.rounds import Round, rounds_of
from tests.decoding.test_prompt_lookup import SLOTS, TEXTS, WIDTH, assert_drafts
from tests.decoding.tiny import BATCH, plain_pass, slow_except, target


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


@pytest.mark.parametrize("num_tokens, min_similarity, prefix_length", [(3, 0.4, 3), (40, -1.0, 1)])
def test_hidden_states_rank_by_equation_3(num_tokens, min_similarity, prefix_length):
    numbers = np.random.default_rng(1)
    states = numbers.normal(size=(TEXTS, SLOTS, WIDTH)) * numbers.uniform(0.1, 9, (SLOTS, 1))
    drafter = PromptLookupPlus(
        num_tokens, layer=1, min_similarity=min_similarity, prefix_length=prefix_length
    )
    assert_drafts(drafter, partial(equation_3, drafter), states.astype(np.float32))


def equation_2(drafter, text: list[int], weights: np.ndarray) -> list[int]:
    """The occurrence of the root that is looked at most."""
    root = len(text) - 1
    candidates = [j for j in range(1, root) if text[j] == text[root]]
    if not candidates:
        return []
    best = max(candidates, key=lambda j: (weights[j], -j))
    return text[best + 1 : best + 1 + drafter.num_tokens]


@pytest.mark.parametrize("num_tokens", [3, 40])
def test_attention_ranks_by_equation_2(num_tokens):
    numbers = np.random.default_rng(2)
    weights = numbers.uniform(size=(TEXTS, SLOTS + 3)).astype(np.float32)
    drafter = PromptLookupPlusAttention(num_tokens, heads=((0, 0),))
    assert_drafts(drafter, partial(equation_2, drafter), state=weights)


@cache
def played(drafter) -> list[Round]:
    engine = Engine(target()[0], drafter, max_new_tokens=80)
    return rounds_of(engine, Params(target()[1]), key=jax.random.key(0))


def test_pld_plus_remembers_the_states_of_a_pass_over_the_committed_text():
    drafter = PromptLookupPlus(layer=1, num_tokens=5, prefix_length=3)
    state = played(drafter)[11].after
    assert state.stats.accepted_lengths[:, 3:].any(), "no path was long"
    model, params = target()
    taps = Taps(hidden_layers=(1,), logits=False)
    expected = plain_pass(params, jnp.asarray(state.tokens), model, taps)[0].hidden[:, :, 0]
    expected = sum(
        np.pad(expected, ((0, 0), (back, 0), (0, 0)))[:, : expected.shape[1]] for back in range(3)
    )
    expected = expected / np.linalg.norm(expected, axis=-1, keepdims=True)
    for row in range(BATCH):
        count = int(state.length[row]) - 1  # the root's is not known yet
        found = state.drafter.states[row, :count]
        np.testing.assert_allclose(found, expected[row, :count], atol=1e-5)


HEADS = ((0, 1), (1, 0), (1, 3))


@pytest.mark.parametrize("aggregate", slow_except(["max", "sum"], "max"))
def test_pld_plus_attention_is_that_of_the_token_before_the_root(aggregate):
    drafter = PromptLookupPlusAttention(num_tokens=5, heads=HEADS, aggregate=aggregate)
    states = [played(drafter)[number].after for number in (0, 4, 24)]
    assert states[-1].stats.accepted_lengths[:, 3:].any(), "no path was long"
    combine = {"max": np.max, "sum": np.sum}[aggregate]
    model, params = target()
    for state in states:
        taps = Taps(attention_heads=HEADS, logits=False)
        output, _ = plain_pass(params, jnp.asarray(state.tokens), model, taps)
        expected = combine(np.asarray(output.attention), axis=1)
        for row in range(BATCH):
            count = int(state.length[row]) - 1
            found = state.drafter[row, :count]
            np.testing.assert_allclose(found, expected[row, count - 1, :count], atol=1e-5)


@pytest.mark.parametrize("layers, expected", [(1, 1), (16, 4), (32, 9), (60, 9)])
def test_pld_plus_takes_the_papers_layer_or_one_as_deep(layers, expected):
    config = replace(target()[0].config, num_hidden_layers=layers)
    assert PromptLookupPlus.layer_for(config) == expected


def test_heads_of_a_layer_stand_in_for_induction_heads():
    config = target()[0].config
    heads = PromptLookupPlusAttention.heads_for(config)
    assert heads == tuple((1, head) for head in range(config.num_attention_heads))
    assert PromptLookupPlusAttention.heads_for(config, 0)[0] == (0, 0)


@pytest.mark.parametrize(
    "drafter, message",
    [
        (PromptLookupPlus(layer=-2), "hidden layer -2 does not exist: the model has layers 0"),
        (PromptLookupPlusAttention(heads=((2, 0),)), r"\(layer 2, head 0\) does not"),
        (PromptLookupPlusAttention(heads=((0, 9),)), r"\(layer 0, head 9\) does not"),
        (PromptLookupPlusAttention(heads=()), "no heads are chosen"),
    ],
)
def test_pld_plus_rejects_settings_that_do_not_fit(drafter, message):
    assert_params_rejected(drafter, None, message)
