"""A request that is stopped early."""

import chex
import jax
import numpy as np
import pytest

from specjax.decoding.drafter import Params
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.generate import num_slots, speculative_generate
from tests.decoding.tiny import prompt, target


@pytest.mark.parametrize("batch", [1, 3])
def test_max_rounds_cuts_the_text_and_compiles_nothing(batch):
    (model, params), given = target(), prompt(batch)
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def generate(max_rounds):
        return speculative_generate(
            Params(params),
            given,
            jax.random.key(1),
            target=model,
            drafter=PromptLookup(),
            max_new_tokens=64,
            max_rounds=max_rounds,
        )

    whole = generate(64)
    for max_rounds in (1, 5):
        cut = generate(max_rounds)
        np.testing.assert_array_equal(cut.stats.rounds, [max_rounds] * batch)
        for row in range(batch):
            length = int(cut.length[row])
            assert max_rounds <= length < whole.length[row]
            np.testing.assert_array_equal(cut.tokens[row, :length], whole.tokens[row, :length])


@pytest.mark.parametrize("prompt_length, padded", [(64, 64), (128, 128), (192, 256)])
def test_slots_are_whole_chunks_of_prompt_the_new_tokens_and_a_round(prompt_length, padded):
    assert num_slots(prompt_length, 100, PromptLookup(num_tokens=10)) == padded + 100 + 11
