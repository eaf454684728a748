"""Length rules, asked one by one, against plain readings; the loop is in test_draft_model.py."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.papers.oracle import Oracle
from specjax.core.errors import SpecjaxError
from specjax.core.settings import SettingError
from specjax.decoding.drafters.length_rules import (
    AnyThreshold,
    Confidence,
    Disco,
    Fixed,
    Heuristic,
    LastDrafted,
    LengthRule,
)
from specjax.models.heads.length_classifier import LengthClassifier
from tests.decoding.contract import assert_rejects_values_out_of_bounds

TEXTS, VOCAB = 200, 15


def classifier(seed: int = 0, hidden_size: int = 6) -> dict[str, Any]:
    """Random weights whose output depends on the position and on the distribution."""
    params = LengthClassifier(hidden_size).initialise(jax.random.key(seed))
    return jax.tree.map(lambda leaf: leaf * 2, params)


def wants_more(
    rule: LengthRule,
    params: Any,  # of this row
    state: Any,  # of this row
    probs: np.ndarray,
    token: int,
    in_draft: int,
    in_new_text: int,
    in_text: int,
) -> bool:
    """Decides for one row as the rule does, by a plain reading."""
    match rule:
        case Fixed(length):
            return in_draft + 1 < length
        case Heuristic():
            return in_draft + 1 < state
        case Confidence(threshold):
            return probs[token] >= threshold
        case Disco(threshold, position):
            place = in_draft if position == "draft" else in_new_text
            return confidence(params, probs, place) >= threshold
        case Oracle():
            return in_text < len(params) and params[in_text] == token
    raise AssertionError(rule)


def confidence(params: Any, probs: np.ndarray, place: int) -> float:
    """DISCO's C in NumPy, float64."""
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    probs = np.asarray(probs, np.float64)
    top = np.sort(probs)[::-1][:10]
    some = probs[probs > 0]
    entropy = -(some * np.log(some)).sum()
    features = np.array([*top, *[0] * (10 - len(top)), entropy, np.log(1 + place)])
    hidden = np.maximum(features @ weights["hidden"]["kernel"] + weights["hidden"]["bias"], 0)
    logit = (hidden @ weights["logit"]["kernel"] + weights["logit"]["bias"]).item()
    return 1 / (1 + np.exp(-logit))


@pytest.mark.parametrize("rule", [Confidence(0.1), Disco(0.45), Disco(0.45, "generation")])
def test_threshold_rules_decide_as_a_plain_reading_does(rule):
    """The rules without a threshold are read plainly in test_draft_model.py."""
    numbers = np.random.default_rng(2)
    probs = numbers.dirichlet([0.5] * VOCAB, TEXTS).astype(np.float32)
    tokens, place = numbers.integers(0, VOCAB, TEXTS), numbers.integers(2, 40, TEXTS)
    params = classifier() if isinstance(rule, Disco) else None
    if params is not None:
        places = np.full(TEXTS, 2) if rule.position == "draft" else place
        scores = [confidence(params, *given) for given in zip(probs, places, strict=True)]
        rule = replace(rule, threshold=float(np.median(scores)) + 1e-4)
    rule.check(params)
    last = LastDrafted(*map(jnp.asarray, (probs, tokens, 2, place, place)))
    rows = zip(probs, tokens, place, strict=True)
    expected = [wants_more(rule, params, None, p, token, 2, at, at) for p, token, at in rows]
    np.testing.assert_array_equal(rule.draft_another(params, None, last), expected)
    given = {"threshold": jnp.float32(rule.threshold), "rule": params}
    again = AnyThreshold(replace(rule, threshold=0.5)).draft_another(given, None, last)
    np.testing.assert_array_equal(again, expected)
    assert 20 < sum(expected) < TEXTS - 20


def test_heuristic_lengths_go_two_up_and_one_down_between_1_and_the_longest():
    rule, longest, rows = Heuristic(start=3), 6, 50
    numbers, state = np.random.default_rng(0), rule.init(rows)
    lengths = [3] * rows
    seen = set()
    for _ in range(30):
        np.testing.assert_array_equal(state, lengths)
        drafted = np.array(lengths) * (numbers.random(rows) < 0.9)  # some rows are finished
        accepted = np.where(numbers.random(rows) < 0.35, drafted, numbers.integers(0, drafted + 1))
        state = rule.update(state, jnp.asarray(drafted), jnp.asarray(accepted), longest)
        for row in range(rows):
            if drafted[row] == 0:
                continue
            if accepted[row] == drafted[row]:
                lengths[row] = min(lengths[row] + 2, longest)
            else:
                lengths[row] = max(lengths[row] - 1, 1)
        seen |= set(lengths)
    assert seen == {1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize("rule", [Fixed, Heuristic, Confidence, Disco])
def test_values_out_of_bounds_are_rejected(rule):
    assert_rejects_values_out_of_bounds(rule())


@pytest.mark.parametrize("rule, field", [(Fixed(7), "length"), (Heuristic(7), "start")])
def test_a_rule_must_not_exceed_the_longest_draft(rule, field):
    with pytest.raises(SettingError) as error:
        rule.longest(6)
    assert error.value.field == field


BROKEN = classifier() | {"logit": {"kernel": jnp.zeros((7, 1)), "bias": jnp.zeros(1)}}


@pytest.mark.parametrize(
    "rule, params, message",
    [
        (Fixed(), classifier(), "length rule Fixed has no params but was given some"),
        (Disco(), None, "length rule Disco needs the weights of a classifier; pass those of"),
        (Disco(), {"hidden": {"bias": 1.0}}, "length rule Disco needs the weights"),
        (Disco(), BROKEN, r"logit.kernel is \(7, 1\), expected \(6, 1\)"),
        (Oracle(), jnp.zeros((3,), jnp.int32), "length rule Oracle needs the whole true texts"),
    ],
)
def test_params_of_another_rule_are_rejected(rule, params, message):
    with pytest.raises(SpecjaxError, match=message) as error:
        rule.check(params)
    assert "\n" not in str(error.value)
