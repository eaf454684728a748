"""Finds the settings of PLD+ that serve a target best (section 5.5); curves of its ablations.

As in the paper: the layer (or the number of heads) at 10 drafted tokens first, then the number of
drafted tokens for it. A longer draft hardly ever lowers the accepted length but costs more on many
machines, so by accepted length the shortest that comes close to the best is taken.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from specjax.bench.curves import Curve
from specjax.core.errors import SpecjaxError
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.drafters.prompt_lookup_plus import (
    Heads,
    PromptLookupPlus,
    PromptLookupPlusAttention,
)
from specjax.tuning.induction_heads import all_heads
from specjax.tuning.runs import Goal, Workload, best

FIRST_NUM_TOKENS = 10
NUM_TOKENS = (5, 10, 20, 30, 40, 50, 70, 100)
NUM_HEADS = (1, 2, 4, 8, 10, 20, 30, 40, 50, 100, 200, 300)
CLOSE = 0.97  # of the best accepted length; there the paper's curve is flat
THRESHOLDS = (-1.0, -0.75, -0.5, 0.0, 0.5, 0.75)


@dataclass(frozen=True)
class Tuner:
    """Sweeps on one target and one set of validation prompts."""

    workload: Workload
    goal: Goal
    report: Callable[[Curve], None] = lambda curve: None  # called with each curve

    def hidden(self, more: bool = False) -> PromptLookupPlus:
        """Tunes PLD+ (h): the best layer, then the best K.

        `more` adds the curves of appendix B.3.
        """
        layers = range(1, self.workload.target.config.num_hidden_layers + 1)
        start = PromptLookupPlus(num_tokens=FIRST_NUM_TOKENS)
        chosen = self._pick(
            Curve("PLD+ (h) over layers, K=10 (Figure 5)", "layer"),
            {layer: replace(start, layer=layer) for layer in layers},
        )
        chosen = self._pick_num_tokens("PLD+ (h)", chosen)
        if more:
            thresholds = {value: replace(chosen, min_similarity=value) for value in THRESHOLDS}
            self._pick(Curve("PLD+ (h) over thresholds (Table 7)", "min_similarity"), thresholds)
        return chosen

    def attention(
        self, ranked: Sequence[tuple[int, int, int]], more: bool = False
    ) -> PromptLookupPlusAttention:
        """Tunes PLD+ (a): the best number of `ranked` heads, then the best K.

        `more` adds the curves of section 7.1: all heads of a layer, by max and by sum.

        Raises:
            SpecjaxError: if no head is ranked.
        """
        heads: Heads = tuple((layer, head) for layer, head, _ in ranked)
        if not heads:
            raise SpecjaxError(
                "no head of this target copied; run `specjax tune induction-heads` on more prompts"
            )
        start = PromptLookupPlusAttention(num_tokens=FIRST_NUM_TOKENS)
        counts = [count for count in NUM_HEADS if count < len(heads)] + [len(heads)]
        chosen = self._pick(
            Curve("PLD+ (a) over the number of heads, K=10 (Table 6)", "number of heads"),
            {count: replace(start, heads=heads[:count]) for count in counts},
        )
        chosen = self._pick_num_tokens("PLD+ (a)", chosen)
        if more:
            self._whole_layers(start)
        return chosen

    def _pick_num_tokens(self, name: str, drafter):
        curve = Curve(f"{name} over K (Figure 4)", "num_tokens")
        others = {"PLD": {count: PromptLookup(count) for count in NUM_TOKENS}}
        candidates = {count: replace(drafter, num_tokens=count) for count in NUM_TOKENS}
        return self._pick(replace(curve, series={name: ()}), candidates, others, CLOSE)

    def _whole_layers(self, start: PromptLookupPlusAttention) -> None:
        config = self.workload.target.config
        per_layer = {
            layer: PromptLookupPlusAttention.heads_for(config, layer)
            for layer in range(config.num_hidden_layers)
        } | {"all": all_heads(config)}
        by_aggregate = {
            aggregate: {
                layer: replace(start, heads=heads, aggregate=aggregate)
                for layer, heads in per_layer.items()
            }
            for aggregate in ("max", "sum")
        }
        curve = Curve("PLD+ (a) with all heads of a layer, K=10 (Figure 3)", "layer", {"max": ()})
        self._pick(curve, by_aggregate["max"], {"sum": by_aggregate["sum"]})

    def _pick(
        self,
        curve: Curve,
        candidates: Mapping,
        others: Mapping[str, Mapping] | None = None,
        close: float = 1.0,
    ):
        """Returns the best of `candidates`, after reporting all of them."""
        name = next(iter(curve.series), "accepted length")
        series = {
            each: self.workload.sweep({value: (own, None) for value, own in drafters.items()})
            for each, drafters in {name: candidates, **(others or {})}.items()
        }
        self.report(replace(curve, series=series))
        return candidates[best(series[name], self.goal, close)]
