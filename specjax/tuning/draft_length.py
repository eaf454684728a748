"""Finds the draft length that serves a target and its draft best (DISCO, section 5, appendix D).

By latency on validation prompts, as in the paper: the best static length, or the threshold of a
rule and then the longest draft that it may ask for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from specjax.bench.curves import Curve
from specjax.decoding.drafters.draft_model import DraftModel
from specjax.decoding.drafters.length_rules import AnyThreshold, ThresholdRule
from specjax.tuning.runs import Workload, best

LENGTHS = (1, 2, 3, 4, 5, 7, 10)
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
LONGEST = (5, 10, 20)


@dataclass(frozen=True)
class LengthTuner:
    """Sweeps of one draft model on one set of validation prompts, by tokens per second."""

    workload: Workload
    drafter: DraftModel
    params: Any  # the drafter's
    report: Callable[[Curve], None] = lambda curve: None  # called with each curve

    def tune(self) -> dict[str, Any]:
        """Returns the best settings of the drafter's rule, as the method takes them."""
        name, rule = self.drafter.rule, self.drafter.length_rule
        if not isinstance(rule, ThresholdRule):
            lengths = {n: replace(self.drafter, length=n, max_length=n) for n in LENGTHS}
            candidates = {n: (drafter, self.params) for n, drafter in lengths.items()}
            return {"rule": name, "length": self._pick("lengths", "length", candidates)}
        start = replace(self.drafter, rule=AnyThreshold(rule), max_length=max(LONGEST))
        thresholds = {value: (start, self._with(value)) for value in THRESHOLDS}
        threshold = self._pick("thresholds", "threshold", thresholds)
        params = self._with(threshold)
        longest = {n: (replace(start, max_length=n), params) for n in LONGEST}
        max_length = self._pick("the longest draft", "max_length", longest)
        return {"rule": name, "threshold": threshold, "max_length": max_length}

    def _with(self, threshold: float) -> dict[str, Any]:
        """Returns the params of a draft model whose rule has a threshold among them."""
        rule = {"threshold": jnp.float32(threshold), "rule": self.params["rule"]}
        return {**self.params, "rule": rule}

    def _pick(
        self, values: str, setting: str, candidates: Mapping[Any, tuple[DraftModel, Any]]
    ) -> Any:
        points = self.workload.sweep(candidates)
        title = f"Draft length, rule {self.drafter.rule}, over {values}"
        self.report(Curve(title, setting, {"accepted length": points}))
        return best(points, "speed")
