"""The engine's programs: warming up runs every compiled width and leaves nothing to compile."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.decoding.drafter import Params
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.engine import Engine
from specjax.decoding.widths import compiled_widths
from tests.decoding.tiny import PASSES, Watched, pass_widths, prompt, target


@pytest.fixture
def watched():
    model, params = target()
    drafter = PromptLookup(num_tokens=20)  # finds nothing in random text
    engine = Engine(Watched(model.config), drafter, max_new_tokens=6)
    PASSES.clear()
    return engine, (Params(params), prompt(1), jax.random.key(0))


def test_warming_up_runs_a_pass_of_every_width(watched):
    engine, (params, asked, key) = watched
    assert compiled_widths(engine.drafter, engine.target, params.target) == [1, 8, 21]
    engine.warm_up(params, asked, key)
    assert set(pass_widths()) >= {1, 8, 21}
    num_compiled = Engine.run._cache_size()
    generation = engine.generation(engine.run(params, engine.prefill(params, asked, key), 6))
    assert int(generation.length[0]) == 6
    state = engine.run(params, engine.prefill(params, asked, key), 1)
    engine.run(params, state, 6)
    assert Engine.run._cache_size() == num_compiled, "later runs compile nothing"


def test_every_pass_is_padded_to_the_width_of_the_target(watched):
    engine, (params, asked, key) = watched
    full = replace(engine, target=Watched(engine.target.config, padded_width=24))
    texts = []
    for drafter in (Autoregressive(), engine.drafter):
        own = replace(full, drafter=drafter)
        state = own.prefill(params, asked, key)
        assert state.cache.num_slots == engine.num_slots(asked.tokens.shape[1])
        jax.effects_barrier()
        PASSES.clear()
        texts.append(np.asarray(own.generation(own.run(params, state, 6)).tokens))
        assert set(pass_widths()) == {24}
    plain = replace(engine, drafter=Autoregressive())
    expected = plain.generation(plain.run(params, plain.prefill(params, asked, key), 6)).tokens
    for text in texts:
        np.testing.assert_array_equal(text, expected)


def test_a_draft_wider_than_the_padded_pass_is_rejected(watched):
    engine, (params, asked, _) = watched
    narrow = replace(engine, target=Watched(engine.target.config, padded_width=16))
    with pytest.raises(SpecjaxError, match="21 tokens, more than padded_width 16"):
        narrow.check(params, asked)


def test_lowered_programs_are_those_that_run(watched):
    engine, (params, asked, key) = watched
    prefill, run = (program.compile() for program in engine.lower(params, asked, key))
    state = prefill(params, asked, key)
    own = engine.generation(run(params, state, 6))
    other = engine.generation(engine.run(params, engine.prefill(params, asked, key), 6))
    np.testing.assert_array_equal(own.tokens, other.tokens)
