"""The trace of a round: its parts write plain decoding's text.

Nothing here asserts how long anything took.
"""

import jax
import numpy as np
import pytest

from benchmarks.claims.traces import round_figures, trace
from specjax import notebook
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.prompt import padded_length
from specjax.loading.targets import LoadedTarget
from specjax.models.config import TransformerConfig
from specjax.models.transformer import Transformer
from specjax.run.engines import make_engine
from specjax.run.runner import Runner

CONFIG = TransformerConfig(64, 16, 24, 1, 2, 1, 8, max_position_embeddings=512)
PROMPT = np.random.default_rng(0).integers(2, 9, 40).tolist()


def by_hand(name: str, draft: float, lengths: list[int]) -> dict:
    """Rounds that verify in 4 ms and need 1 ms for the rest; the first was interrupted."""
    rounds = [notebook.Round(draft, 4e-3, 1e-3, length) for length in lengths]
    return round_figures(name, [notebook.Round(9.0, 9.0, 9.0, 1), *rounds])


FAST = by_hand("fast", 3e-3, [1, 1, 4, 3, 4, 4])


def test_every_part_of_every_round_is_measured():
    model = Transformer(CONFIG)
    target = LoadedTarget(model, model.initialise(jax.random.key(0)), None, CONFIG, "tiny")
    engine = make_engine(target, (PromptLookup(), None), max_new_tokens=20)
    pld = Runner("pld", *engine, padded_length([PROMPT]))
    [timed] = trace([pld], [PROMPT])
    [text] = pld.read(pld.decode(pld.prefill(pld.prepare([PROMPT]))))
    assert (timed["num_rounds"], timed["accepted_length"]) == (text.rounds, 20 / text.rounds)
    assert text.rounds < 20, "nothing was ever accepted"
    assert all(timed[f"{part}_seconds"] > 0 for part in notebook.PARTS)


def test_figures_are_medians_over_the_rounds():
    figures = dict(FAST)
    assert figures.pop("method") == "fast"
    assert figures.pop("draft_quartiles") == pytest.approx([3e-3, 3e-3])
    assert figures.pop("draft_share_quartiles") == pytest.approx([0.354, 0.375, 0.375], abs=0.022)
    assert figures == pytest.approx(
        {
            "num_rounds": 7,
            "accepted_length": 18 / 7,
            "draft_seconds": 3e-3,
            "verify_seconds": 4e-3,
            "rest_seconds": 1e-3,
        }
    )
