"""Times the parts of rounds, and summarises what drafting, verifying and committing cost.

Each part is compiled separately, which takes a little longer than a round in one program.
"""

from collections.abc import Sequence
from itertools import chain
from statistics import fmean, median
from typing import Any

import numpy as np

from specjax.bench.measure import with_progress
from specjax.run.runner import Round, Runner

PARTS = ("draft", "verify", "rest")


def trace(runners: Sequence[Runner], prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Times all methods in turn on every prompt, after compiling; returns their figures."""
    for runner in with_progress(runners, "Compiling the parts of rounds", len(runners)):
        _rounds(runner, prompts[0])
    timed = [[_rounds(runner, ids) for runner in runners] for ids in prompts]
    return [
        round_figures(runner.name, list(chain(*of_method)))
        for runner, of_method in zip(runners, zip(*timed, strict=True), strict=True)
    ]


def round_figures(name: str, rounds: Sequence[Round]) -> dict[str, Any]:
    """Returns the figures of a method's rounds; seconds are medians."""
    seconds = {f"{part}_seconds": median(getattr(one, part) for one in rounds) for part in PARTS}
    shares = [one.draft / one.seconds for one in rounds]
    return {
        "method": name,
        "num_rounds": len(rounds),
        "accepted_length": fmean(one.num_tokens for one in rounds),
        **seconds,
        "draft_quartiles": np.percentile([one.draft for one in rounds], (25, 75)).tolist(),
        "draft_share_quartiles": np.percentile(shares, (25, 50, 75)).tolist(),
        "round_seconds": sum(seconds.values()),
    }


def _rounds(runner: Runner, ids: Sequence[int]) -> list[Round]:
    return list(runner.rounds(runner.prepare([ids])))
