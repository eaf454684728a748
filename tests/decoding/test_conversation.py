"""Conversations: a turn reads only what is new, and its text is that of a fresh start."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.decoding import Engine, Params, Sampling
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.drafters.prompt_lookup_plus import PromptLookupPlus
from specjax.decoding.prompt import from_ids
from specjax.models.config import Rope
from tests.decoding.rounds import texts_of
from tests.decoding.test_contract import of_method
from tests.decoding.tiny import PASSES, Watched, pass_widths, target

KEY, LATER = jax.random.split(jax.random.key(3))


def ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 40, count).tolist()


def test_a_second_turn_reads_only_new_tokens_and_equals_a_fresh_start():
    (model, params), (drafter, known) = target(), of_method("hybrid")
    sampling = Sampling(temperature=0.7)
    engine = Engine(Watched(model.config), drafter, sampling, max_new_tokens=20, eos=(7,))
    given = Params(params, known)
    padded = partial(from_ids, bucket=384)  # so that all turns share programs
    asked = [ids(count, seed) for seed, count in enumerate((300, 275, 310))]
    state = engine.run(given, engine.resume(given, None, padded(asked), KEY), 20)
    said = texts_of(state)
    assert len({len(text) - len(before) for text, before in zip(said, asked, strict=True)}) > 1
    after = padded([[*text, *ids(30, seed)] for seed, text in enumerate(said)])

    def read(begin):
        PASSES.clear()
        begun = jax.block_until_ready(begin())
        return len(pass_widths()), begun

    passes, fresh = read(lambda: engine.resume(given, None, after, LATER))
    fewer, resumed = read(lambda: engine.resume(given, state, after, LATER))
    assert (passes, fewer) == (3, 1)
    start = min(map(len, said)) - 1
    np.testing.assert_array_equal(PASSES[0][:, :30], after.tokens[:, start : start + 30])

    fresh, resumed = (engine.run(given, begun, 20) for begun in (fresh, resumed))
    assert texts_of(resumed) == texts_of(fresh)
    np.testing.assert_array_equal(resumed.stats.accepted_lengths, fresh.stats.accepted_lengths)
    # A third turn, after the user has changed the second one.
    changed = padded([[*text[:250], *ids(20, seed)] for seed, text in enumerate(said)])
    passes, third = read(lambda: engine.resume(given, resumed, changed, KEY))
    assert passes == 1
    alone = engine.run(given, engine.resume(given, None, changed, KEY), 20)
    assert texts_of(engine.run(given, third, 20)) == texts_of(alone)


def test_keys_that_depend_on_the_length_of_the_prompt_are_not_kept():
    model, params = target(layers=1)
    rope = Rope(rope_type="dynamic", factor=2.0)
    model = Watched(replace(model.config, rope=rope, max_position_embeddings=64))
    engine = Engine(model, PromptLookup(), max_new_tokens=4)
    given, asked = Params(params), ids(60, 0)
    fresh = engine.run(given, engine.prefill(given, from_ids([asked]), KEY), 4)
    state = engine.run(given, engine.resume(given, None, from_ids([asked]), KEY), 4)
    assert texts_of(state) == texts_of(fresh)
    PASSES.clear()
    engine.resume(given, state, from_ids([[*asked, *ids(3, 1)]]), KEY)
    assert len(pass_widths()) == 1 and PASSES[0][0, :60].tolist() == asked


def test_a_state_without_hidden_states_or_of_another_batch_is_rejected():
    model, params = target()
    given, asked = Params(params), from_ids([ids(9, 0)])
    for drafter, later, message in (
        (PromptLookupPlus(8, layer=2), asked, "the state comes from prefill"),
        (
            PromptLookup(),
            from_ids([ids(9, 0)] * 2),
            r"the state holds 1 sequence\(s\), the prompt 2",
        ),
    ):
        engine = Engine(model, drafter, max_new_tokens=4)
        state = engine.prefill(given, asked, KEY)
        with pytest.raises(SpecjaxError, match=message):
            engine.resume(given, state, later, KEY)
