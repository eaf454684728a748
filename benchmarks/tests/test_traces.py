"""The trace of a round: its parts write plain decoding's text.

Nothing here asserts how long anything took.
"""

import numpy as np
import pytest

from benchmarks.pocket import round_figures, trace
from specjax import notebook
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.prompt import padded_length
from specjax.run.engines import make_engine
from specjax.run.runner import Runner
from tests.loading.tiny import tiny

PROMPT = np.random.default_rng(0).integers(2, 9, 40).tolist()


@pytest.mark.slow
def test_every_part_of_every_round_is_measured():
    engine = make_engine(tiny(), (PromptLookup(), None), max_new_tokens=20)
    pld = Runner("pld", *engine, padded_length([PROMPT]))
    [timed] = trace([pld], [PROMPT])
    [text] = pld.read(pld.decode(pld.prefill(pld.prepare([PROMPT]))))
    assert (timed["num_rounds"], timed["accepted_length"]) == (text.rounds, 20 / text.rounds)
    assert text.rounds < 20, "nothing was ever accepted"
    assert all(timed[f"{part}_seconds"] > 0 for part in notebook.PARTS)


def test_figures_are_medians_over_the_rounds():
    """The first round was interrupted."""
    rounds = [notebook.Round(3e-3, 4e-3, 1e-3, length) for length in (1, 1, 4, 3, 4, 4)]
    figures = round_figures("fast", [notebook.Round(9.0, 9.0, 9.0, 1), *rounds])
    assert figures.pop("method") == "fast"
    assert figures == pytest.approx(
        {
            "num_rounds": 7,
            "accepted_length": 18 / 7,
            "draft_seconds": 3e-3,
            "verify_seconds": 4e-3,
            "rest_seconds": 1e-3,
        }
    )
