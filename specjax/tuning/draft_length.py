"""Finds the draft length that serves a target and its draft best (DISCO, section 5, appendix D).

By latency on validation prompts, as in the paper: the best static length, or the threshold of a
rule and then the longest draft that it may ask for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from specjax.bench.curves import Curve
from specjax.decoding.drafters.draft_model import DraftModel
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
        rule = self.drafter.rule
        if rule == "fixed":
            lengths = {n: replace(self.drafter, length=n, max_length=n) for n in LENGTHS}
            return {"rule": rule, "length": self._pick("lengths", "length", lengths)}
        start = replace(self.drafter, max_length=max(LONGEST))
        thresholds = {value: replace(start, threshold=value) for value in THRESHOLDS}
        threshold = self._pick("thresholds", "threshold", thresholds)
        longest = {n: replace(thresholds[threshold], max_length=n) for n in LONGEST}
        max_length = self._pick("the longest draft", "max_length", longest)
        return {"rule": rule, "threshold": threshold, "max_length": max_length}

    def _pick(self, values: str, setting: str, drafters: Mapping[Any, DraftModel]) -> Any:
        points = self.workload.sweep(drafters, self.params)
        title = f"Draft length, rule {self.drafter.rule}, over {values}"
        self.report(Curve(title, setting, {"accepted length": points}))
        return best(points, "speed")
