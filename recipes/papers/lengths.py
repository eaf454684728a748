"""Sweeps the rules of a draft model for the fastest one (DISCO, section 5 and appendix D)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool

from specjax.decoding.drafters.draft_model import DraftModel
from specjax.decoding.drafters.length_rules import LastDrafted, LengthRule, State, ThresholdRule
from specjax.tuning.runs import Report, Workload

Settings = dict[str, Any]

LENGTHS = (1, 2, 3, 4, 5, 7, 10)
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
MAX_LENGTHS = (5, 10, 20)


@dataclass(frozen=True)
class AnyThreshold(LengthRule):
    """A rule whose threshold is one of its params, so that all thresholds share a program.

    Params are `{"threshold": scalar, "rule": those of the rule}`.
    """

    rule: ThresholdRule

    def check(self, params: Any) -> None:
        self.rule.check(params["rule"])

    def draft_another(self, params: Any, state: State, last: LastDrafted) -> Bool[Array, " B"]:
        return self.rule.score(params["rule"], last) >= params["threshold"]


def tune_length(workload: Workload, drafter: DraftModel, params: Any, report: Report) -> Settings:
    """Finds the fastest static length, or the threshold of a rule and then the longest draft."""
    name, rule = drafter.rule, drafter.length_rule
    title = f"Draft length, rule {name}, over "
    if not isinstance(rule, ThresholdRule):
        lengths = {n: (replace(drafter, length=n, max_length=n), params) for n in LENGTHS}
        return {
            "rule": name,
            "length": _fastest(workload, title + "lengths", "length", lengths, report),
        }

    def with_threshold(value: float) -> Settings:
        return {**params, "rule": {"threshold": jnp.float32(value), "rule": params["rule"]}}

    start = replace(drafter, rule=AnyThreshold(rule), max_length=max(MAX_LENGTHS))
    thresholds = {value: (start, with_threshold(value)) for value in THRESHOLDS}
    threshold = _fastest(workload, title + "thresholds", "threshold", thresholds, report)
    best = with_threshold(threshold)
    longest = {n: (replace(start, max_length=n), best) for n in MAX_LENGTHS}
    max_length = _fastest(workload, title + "the longest draft", "max_length", longest, report)
    return {"rule": name, "threshold": threshold, "max_length": max_length}


def _fastest(
    workload: Workload,
    title: str,
    setting: str,
    candidates: Mapping[Any, tuple[DraftModel, Any]],
    report: Report,
) -> Any:
    points = workload.sweep(candidates)
    report(title, setting, points)
    return max(points, key=lambda point: point.tokens_per_second).value
