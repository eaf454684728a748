"""Sweeps one setting of a method after the other, and keeps the best value of each."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specjax.core.errors import SpecjaxError
from specjax.decoding.drafters.prompt_lookup_plus import (
    Heads,
    PromptLookupPlus,
    PromptLookupPlusAttention,
)
from specjax.tuning.runs import Report, Workload

Settings = dict[str, Any]

FIRST_NUM_TOKENS = 10  # while the layer, or the number of heads, is swept (PLD+, section 5.5)
NUM_TOKENS = (5, 10, 20, 30, 40, 50, 70, 100)
NUM_HEADS = (1, 2, 4, 8, 10, 20, 30, 40, 50, 100, 200, 300)
# A longer draft hardly ever lowers the accepted length but costs more on many machines. So the
# shortest whose accepted length is close to the best is taken; there the paper's curve is flat.
TOLERANCE = 0.97


def tune_hidden(workload: Workload, report: Report) -> Settings:
    """Tunes PLD+ by hidden states: the layer, then the number of drafted tokens."""
    start = PromptLookupPlus(num_tokens=FIRST_NUM_TOKENS)
    layers = range(1, workload.target.config.num_hidden_layers + 1)
    layer = workload.pick(
        "PLD+ (h) over layers, K=10 (Figure 5)",
        "layer",
        {layer: (replace(start, layer=layer), None) for layer in layers},
        report,
    )
    best = replace(start, layer=layer)
    return {"layer": layer, "num_tokens": _num_tokens("PLD+ (h)", best, workload, report)}


def tune_attention(
    workload: Workload, ranked: Sequence[tuple[int, int, int]], report: Report
) -> Settings:
    """Tunes PLD+ by attention: the number of ranked heads, then the number of drafted tokens."""
    heads: Heads = tuple((layer, head) for layer, head, _ in ranked)
    if not heads:
        raise SpecjaxError(
            "no head of this target copied; run `specjax tune induction-heads` on more prompts"
        )
    start = PromptLookupPlusAttention(num_tokens=FIRST_NUM_TOKENS)
    count = workload.pick(
        "PLD+ (a) over the number of heads, K=10 (Table 6)",
        "number of heads",
        {count: (replace(start, heads=heads[:count]), None) for count in head_counts(heads)},
        report,
    )
    best = replace(start, heads=heads[:count])
    num_tokens = _num_tokens("PLD+ (a)", best, workload, report)
    return {"heads": best.heads, "num_tokens": num_tokens}


def head_counts(heads: Sequence) -> list[int]:
    """Returns the numbers of ranked heads to try."""
    return [count for count in NUM_HEADS if count < len(heads)] + [len(heads)]


def _num_tokens(name: str, drafter: Any, workload: Workload, report: Report) -> int:
    candidates = {count: (replace(drafter, num_tokens=count), None) for count in NUM_TOKENS}
    title = f"{name} over K (Figure 4)"
    return workload.pick(title, "num_tokens", candidates, report, TOLERANCE)
