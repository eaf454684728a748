"""A head that has learned some texts by heart drafts them: training and decoding fit together."""

from typing import Any

import jax
import numpy as np
import pytest

from specjax.decoding.drafter import Params
from specjax.decoding.drafters.eagle2 import Eagle2
from specjax.decoding.generate import speculative_generate
from specjax.decoding.prompt import from_ids
from specjax.decoding.reference import reference_generate
from specjax.decoding.state import Generation
from specjax.models.heads.eagle import EagleConfig, EagleHead
from specjax.training.data import DataOptions, batches
from specjax.training.examples import Example
from specjax.training.loop import LoopOptions, train
from specjax.training.objectives.hass import HassTraining
from specjax.training.optimizer import OptimizerOptions, optimizer_of
from tests.decoding import tiny

NUM_STEPS, NEW_TOKENS, DEPTH = 150, 48, 4
KEY = jax.random.key(0)
TARGET, RANDOM = tiny.target()
# More certain of its tokens, so that a head that knows its texts can predict it.
FROZEN = RANDOM | {"lm_head": {"weight": RANDOM["lm_head"]["weight"] * 6}}
HEAD = EagleHead(EagleConfig.for_target(TARGET.config))
PROMPTS = [np.random.default_rng(1).integers(0, 40, size).tolist() for size in (6, 9, 5)]
PROMPT = from_ids(PROMPTS, bucket=16)


def drafted(params: Any) -> Generation:
    drafter = Eagle2(HEAD, top_k=2, depth=DEPTH, num_tokens=8)
    settings = {"target": TARGET, "drafter": drafter, "max_new_tokens": NEW_TOKENS}
    return speculative_generate(Params(FROZEN, params), PROMPT, KEY, **settings)


@pytest.mark.slow
def test_a_head_drafts_the_texts_that_it_was_trained_on():
    """It accepts nearly `DEPTH` + 1 tokens a round: at best 48 tokens take 10 rounds."""
    settings = {"target": TARGET, "max_new_tokens": NEW_TOKENS}
    answers = np.asarray(reference_generate(FROZEN, PROMPT, KEY, **settings)[0])
    examples = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        text = np.array([*prompt, *answer], np.int32)
        examples.append(Example(text, np.arange(len(text)) >= len(prompt)))
    options = OptimizerOptions(learning_rate=1e-2, warmup=0.05, decay="cosine")
    start = HEAD.initialise(jax.random.key(3))
    trained = train(
        HassTraining(noise=0.0).loss(HEAD, TARGET),
        start,
        batches(examples, DataOptions(batch_size=len(examples), longest=64)),  # in one batch
        optimizer_of(options, NUM_STEPS),
        LoopOptions(NUM_STEPS, log_every=NUM_STEPS, save_every=NUM_STEPS, eval_every=NUM_STEPS),
        frozen=FROZEN,
    ).params
    before, after = drafted(start), drafted(trained)
    for generation in (before, after):
        np.testing.assert_array_equal(generation.tokens, answers)
    assert before.stats.mean_accepted_length < 1.5
    assert after.stats.mean_accepted_length > 0.75 * (DEPTH + 1)
