"""The engine's programs: warming up runs every compiled width and leaves nothing to compile."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from specjax.core.errors import SpecjaxError
from specjax.decoding.drafter import Params
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.engine import Engine
from specjax.decoding.widths import compiled_widths
from specjax.models.transformer import Transformer
from tests.decoding.tiny import prompt, target

PASSES: list[int] = []  # rows of each target pass that was executed


class Watched(Transformer):
    """A target that notes the rows of every pass when it runs, not when it is compiled."""

    @nn.nowrap
    def run(self, params, rows, cache, taps):
        num_rows = rows.tokens.shape[1]
        jax.debug.callback(lambda: PASSES.append(num_rows))
        return super().run(params, rows, cache, taps)


@pytest.fixture
def with_progress():
    model, params = target()
    drafter = PromptLookup(num_tokens=20)  # finds nothing in random text
    engine = Engine(Watched(model.config), drafter, max_new_tokens=6)
    PASSES.clear()
    return engine, (Params(params), prompt(1), jax.random.key(0))


def test_warming_up_runs_a_pass_of_every_width(with_progress):
    engine, (params, asked, key) = with_progress
    assert compiled_widths(engine.drafter, jnp.float32) == [1, 8, 21]
    engine.warm_up(params, asked, key)
    jax.effects_barrier()
    assert set(PASSES) >= {1, 8, 21}
    num_compiled = Engine.run._cache_size()
    generation = engine.generation(engine.run(params, engine.prefill(params, asked, key), 6))
    assert int(generation.length[0]) == 6
    state = engine.run(params, engine.prefill(params, asked, key), 1)
    engine.run(params, state, 6)
    assert Engine.run._cache_size() == num_compiled, "going on compiles nothing"


def test_every_pass_has_the_rows_that_the_target_asks_for(with_progress):
    engine, (params, asked, key) = with_progress
    full = replace(engine, target=Watched(engine.target.config, padded_width=24))
    texts = []
    for drafter in (Autoregressive(), engine.drafter):
        own = replace(full, drafter=drafter)
        state = own.prefill(params, asked, key)
        assert state.cache.num_slots == engine.num_slots(asked.tokens.shape[1])
        jax.effects_barrier()
        PASSES.clear()
        texts.append(np.asarray(own.generation(own.run(params, state, 6)).tokens))
        jax.effects_barrier()
        assert set(PASSES) == {24}
    plain = replace(engine, drafter=Autoregressive())
    expected = plain.generation(plain.run(params, plain.prefill(params, asked, key), 6)).tokens
    for text in texts:
        np.testing.assert_array_equal(text, expected)


def test_a_draft_of_more_rows_than_a_pass_is_refused(with_progress):
    engine, (params, asked, _) = with_progress
    narrow = replace(engine, target=Watched(engine.target.config, padded_width=16))
    with pytest.raises(SpecjaxError, match="21 tokens, more than padded_width 16"):
        narrow.check(params, asked)


def test_rows_that_fill_up_a_pass_have_slots(with_progress):
    engine, (_, asked, _) = with_progress
    wide = replace(engine, target=Watched(engine.target.config, padded_width=200))
    length = asked.tokens.shape[1]
    assert wide.num_slots(length) == engine.num_slots(length) + 128


def test_a_wider_pass_says_the_same(with_progress):
    engine, (params, asked, key) = with_progress
    texts = []
    for width in compiled_widths(engine.drafter, jnp.float32):
        state = engine.prefill(params, asked, key)
        state = replace(state, min_width=jnp.asarray(width, jnp.int32))
        texts.append(np.asarray(engine.generation(engine.run(params, state, 6)).tokens))
    np.testing.assert_array_equal(texts[0], texts[1])
    np.testing.assert_array_equal(texts[0], texts[2])


def test_lowered_programs_are_those_that_run(with_progress):
    engine, (params, asked, key) = with_progress
    prefill, run = (program.compile() for program in engine.lower(params, asked, key))
    state = prefill(params, asked, key)
    own = engine.generation(run(params, state, 6))
    other = engine.generation(engine.run(params, engine.prefill(params, asked, key), 6))
    np.testing.assert_array_equal(own.tokens, other.tokens)
