"""The draft length that serves a target and its draft best (DISCO, section 5 and appendix D).

As in the paper by latency, on validation prompts: the best static length, or the threshold of a
rule and then the longest draft that it may ask for.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specjax.bench.curves import Curve
from specjax.bench.measure import Request
from specjax.decoding.drafters.draft_model import DraftModel
from specjax.decoding.drafters.length_rules import Confidence, Disco, Fixed
from specjax.hub import LoadedTarget
from specjax.tuning.sweep import best, sweep

LENGTHS = (1, 2, 3, 4, 5, 7, 10)
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
LONGEST = (5, 10, 20)


@dataclass(frozen=True)
class LengthTuner:
    """Sweeps of one draft model on one set of validation prompts, by tokens per second.

    `params` are those of the drafter; `report` is called with each curve when it is there.
    """

    target: LoadedTarget
    drafter: DraftModel
    params: Any
    requests: Sequence[Request]
    max_new_tokens: int
    report: Callable[[Curve], None] = lambda curve: None

    def tune(self) -> dict[str, Any]:
        """The best settings of the drafter's rule, as `draft-model` takes them."""
        if isinstance(self.drafter.rule, Confidence | Disco):
            return self._threshold(self.drafter.rule)
        return self._static_length()

    def _static_length(self) -> dict[str, Any]:
        lengths = {
            length: replace(self.drafter, rule=Fixed(length), max_length=length)
            for length in LENGTHS
        }
        length = self._pick("draft-model, fixed, over lengths", "length", lengths)
        return {"rule": "fixed", "length": length}

    def _threshold(self, rule: Confidence | Disco) -> dict[str, Any]:
        name = "disco" if isinstance(rule, Disco) else "confidence"
        rules = {value: replace(rule, threshold=value) for value in THRESHOLDS}
        start = replace(self.drafter, max_length=max(LONGEST))
        thresholds = {value: replace(start, rule=rules[value]) for value in THRESHOLDS}
        title = f"draft-model, {name}"
        threshold = self._pick(f"{title}, over thresholds", "threshold", thresholds)
        chosen = thresholds[threshold]
        longest = {most: replace(chosen, max_length=most) for most in LONGEST}
        most = self._pick(f"{title}, over the longest draft", "max_length", longest)
        return {"rule": name, "threshold": threshold, "max_length": most}

    def _pick(self, title: str, setting: str, drafters: Mapping[Any, DraftModel]) -> Any:
        points = sweep(drafters, self.requests, self.target, self.max_new_tokens, self.params)
        self.report(Curve(title, setting, {"accepted length": points}))
        return best(points, "speed")
