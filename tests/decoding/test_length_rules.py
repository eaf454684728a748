"""Length rules, asked one by one, against plain readings; the loop is in test_draft_model.py."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.papers.lengths import AnyThreshold
from recipes.papers.oracle import Oracle
from specjax.core.errors import SpecjaxError
from specjax.core.settings import SettingError
from specjax.decoding.drafters import length_rules
from specjax.decoding.drafters.length_rules import Confidence, Disco, Fixed, Heuristic
from specjax.models.heads.length_classifier import LengthClassifier
from tests.decoding.contract import assert_rejects_values_out_of_bounds

TEXTS, VOCAB, SLOTS = 200, 15, 12


def classifier(seed: int = 0, hidden_size: int = 6) -> dict[str, Any]:
    """Random weights whose output depends on the position and on the distribution."""
    params = LengthClassifier(hidden_size).initialise(jax.random.key(seed))
    return jax.tree.map(lambda leaf: leaf * 2, params)


def wants_more(
    rule: length_rules.LengthRule,
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


CASES = {
    "fixed": (Fixed(3), None),
    "fixed, longer": (Fixed(4), None),
    "heuristic": (Heuristic(4), np.random.default_rng(2).integers(1, 7, TEXTS)),
    "confidence": (Confidence(0.1), None),
    "disco": (Disco(0.45), None),
    "disco-generation": (Disco(0.45, "generation"), None),
    "oracle": (Oracle(), None),
}


@pytest.mark.parametrize("name", CASES)
def test_rules_decide_as_a_plain_reading_does(name):
    (rule, state), numbers, in_draft = CASES[name], np.random.default_rng(2), 2
    probs = numbers.dirichlet([0.5] * VOCAB, TEXTS).astype(np.float32)
    tokens = numbers.integers(0, VOCAB, TEXTS)
    places = numbers.integers(in_draft, 40, TEXTS), numbers.integers(0, SLOTS + 4, TEXTS)
    params, row_params = None, lambda row: params
    if name == "oracle":
        texts = numbers.integers(0, VOCAB, (TEXTS, SLOTS))
        at = np.minimum(places[1], SLOTS - 1)
        tokens = np.where(numbers.random(TEXTS) < 0.5, texts[np.arange(TEXTS), at], tokens)
        params, row_params = jnp.asarray(texts), lambda row: texts[row]
    elif "disco" in name:
        params = classifier()
        place = np.full(TEXTS, in_draft) if rule.position == "draft" else places[0]
        said = [confidence(params, probs[row], place[row]) for row in range(TEXTS)]
        rule = replace(rule, threshold=float(np.median(said)) + 1e-4)
    rule.check(params)
    last = length_rules.LastDrafted(*map(jnp.asarray, (probs, tokens, in_draft, *places)))
    found = rule.draft_another(params, None if state is None else jnp.asarray(state), last)
    states = [None] * TEXTS if state is None else state
    of_text = zip(states, probs, tokens, [in_draft] * TEXTS, *places, strict=True)
    expected = [wants_more(rule, row_params(row), *each) for row, each in enumerate(of_text)]
    np.testing.assert_array_equal(found, expected)
    if isinstance(rule, length_rules.ThresholdRule):
        given = {"threshold": jnp.float32(rule.threshold), "rule": params}
        again = AnyThreshold(replace(rule, threshold=0.5)).draft_another(given, state, last)
        np.testing.assert_array_equal(again, expected)
    if not name.startswith(("fixed", "heuristic")):
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
    assert rule.longest(20) == (7 if isinstance(rule, Fixed) else 20)
    with pytest.raises(SettingError) as error:
        rule.longest(6)
    assert error.value.field == field


BROKEN = classifier() | {"logit": {"kernel": jnp.zeros((7, 1)), "bias": jnp.zeros(1)}}


@pytest.mark.parametrize(
    "rule, params, message",
    [
        (Disco(), {"hidden": {"bias": 1.0}}, "length rule Disco needs the weights"),
        (Disco(), BROKEN, r"logit.kernel is \(7, 1\), expected \(6, 1\)"),
        (Oracle(), jnp.zeros((2, 3)), "length rule Oracle needs the whole true texts"),
        (Oracle(), jnp.zeros((3,), jnp.int32), "length rule Oracle needs the whole true texts"),
    ],
)
def test_params_of_another_rule_are_rejected(rule, params, message):
    with pytest.raises(SpecjaxError, match=message) as error:
        rule.check(params)
    assert "\n" not in str(error.value)
