"""The choice of a draft length, on made-up speeds."""

import pytest

from recipes.papers.lengths import LENGTHS, MAX_LENGTHS, THRESHOLDS, tune_length
from specjax.decoding.drafters.draft_model import DraftModel
from specjax.tuning.runs import Point, Workload
from tests.loading.tiny import tiny

FASTEST = (3, 0.3, 10)


@pytest.fixture
def tuned(monkeypatch):
    """Tunes a rule with made-up speeds; returns the settings and the candidates of each sweep."""
    seen = []

    def sweep(workload, candidates):
        seen.append(candidates)
        return [Point(value, 1.0, 1.0 + (value in FASTEST)) for value in candidates]

    def tune(rule):
        target = tiny()
        rule_params = {"draft": target.params, "rule": "classifier"}
        inputs = Workload(target, [], 16), DraftModel(target.model, rule), rule_params
        return tune_length(*inputs, lambda *points: None), seen

    monkeypatch.setattr(Workload, "sweep", sweep)
    return tune


def test_the_fastest_static_length_wins(tuned):
    settings, [lengths] = tuned("fixed")
    assert settings == {"rule": "fixed", "length": 3}
    assert [drafter.max_depth for drafter, _ in lengths.values()] == list(LENGTHS)


@pytest.mark.parametrize("rule", ["confidence", "disco"])
def test_all_thresholds_are_tried_with_one_program(tuned, rule):
    settings, (thresholds, longest) = tuned(rule)
    assert settings == {"rule": rule, "threshold": 0.3, "max_length": 10}
    assert len({drafter for drafter, _ in thresholds.values()}) == 1
    rules = [params["rule"] for _, params in thresholds.values()]
    assert [float(each["threshold"]) for each in rules] == pytest.approx(THRESHOLDS)
    assert [drafter.max_depth for drafter, _ in longest.values()] == list(MAX_LENGTHS)
    assert all(params["rule"] == rules[2] for _, params in longest.values())
    assert rules[2]["rule"] == "classifier"
