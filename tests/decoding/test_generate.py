"""Requests as programs: what compiles once, what is cut short, and what a batch is.

Warming up runs every compiled width and leaves nothing to compile.
"""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import Engine, Params, reference_generate, speculative_generate
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.drafters.prompt_lookup_plus import PromptLookupPlus
from specjax.decoding.prompt import from_ids
from specjax.decoding.widths import compiled_widths
from specjax.models.config import Rope
from specjax.models.families import read_config
from specjax.models.io.huggingface import load_transformer
from specjax.models.transformer import Transformer
from tests.decoding.contract import KEY, SAMPLINGS, continued
from tests.decoding.rounds import rows_of
from tests.decoding.tiny import BATCH, PASSES, OracleTree, Watched, pass_widths, prompt, target
from tests.models import checkpoints


def test_one_program_that_users_jit_serves_all_prompts_of_a_bucket_and_all_numbers_of_rounds():
    model, params = target()
    engine = Engine(model, PromptLookup(), max_new_tokens=24)
    chex.clear_trace_counter()

    @partial(jax.jit, donate_argnums=0)
    @chex.assert_max_traces(n=1)
    def traced_once(params, prompt, key, max_rounds):
        return engine.generate(params, prompt, key, max_rounds)

    def generate(given, max_rounds=24):
        return traced_once(Params(jax.tree.map(jnp.copy, params)), given, KEY, max_rounds)

    whole = generate(prompt())
    expected, _ = reference_generate(params, prompt(), KEY, target=model, max_new_tokens=24)
    np.testing.assert_array_equal(whole.tokens, expected)
    for max_rounds in (1, 4):
        cut = generate(prompt(), max_rounds)
        np.testing.assert_array_equal(cut.stats.rounds, [max_rounds] * BATCH)
        for row, length in enumerate(cut.length.tolist()):
            assert max_rounds <= length < whole.length[row]
            np.testing.assert_array_equal(cut.tokens[row, :length], whole.tokens[row, :length])
    numbers = np.random.default_rng(0)
    for _ in range(10):
        lengths = numbers.integers(2, 33, BATCH)
        ids = [numbers.integers(0, 40, length).tolist() for length in lengths]
        assert (generate(from_ids(ids, bucket=32)).length == 24).all()
    with pytest.raises(AssertionError, match="traced"):
        generate(from_ids([[1] * 40] * BATCH, bucket=32))


def test_the_parts_of_a_run_can_be_traced():
    model, params = target()
    engine = Engine(model, PromptLookup(), max_new_tokens=24)
    state = jax.eval_shape(engine.prefill, Params(params), prompt(), KEY)
    state = jax.eval_shape(engine.run, Params(params), state, 4)
    assert jax.eval_shape(engine.generation, state).tokens.shape == (BATCH, 24)


@pytest.mark.parametrize("prompt_length, padded", [(64, 64), (128, 128), (192, 256)])
def test_slots_are_those_of_text_and_round_each_rounded_up(prompt_length, padded):
    engine = Engine(target()[0], PromptLookup(num_tokens=10), max_new_tokens=100)
    assert engine.num_slots(prompt_length) == -(-(padded + 100) // 128) * 128 + 128


def test_a_sequence_of_a_batch_equals_its_prompt_alone():
    """Also with a dynamic RoPE, which depends on how long each text is: 45 to 70 tokens."""
    model, params = target(layers=1)
    config = replace(model.config, max_position_embeddings=48, rope=Rope("dynamic", factor=2.0))
    sampling, drafter = SAMPLINGS["sampled"], PromptLookupPlus(7, layer=1)
    engine = Engine(Transformer(config), drafter, sampling, max_new_tokens=40)
    batch = prompt()
    together = engine.generate(Params(params), batch, KEY)
    for row, text in enumerate(rows_of(batch.tokens, batch.length)):
        alone = from_ids([text], bucket=30)  # the padding, to 30 or 32 tokens, must not count
        out = engine.generate(Params(params), alone, jax.random.fold_in(KEY, row))
        np.testing.assert_array_equal(out.tokens[0], together.tokens[row])


@pytest.mark.slow
def test_a_dynamic_rope_depends_on_the_text_so_far_and_on_nothing_else():
    """Prompts on both sides of the 48 positions after which the frequencies change."""
    model, params = target()
    config = replace(model.config, max_position_embeddings=48, rope=Rope("dynamic", factor=4.0))
    run = {"target": Transformer(config), "sampling": SAMPLINGS["sampled"]}
    numbers = np.random.default_rng(5)
    given = from_ids([numbers.integers(0, 40, length).tolist() for length in (60, 30, 5)], 64)
    expected, _ = reference_generate(params, given, KEY, **run, max_new_tokens=100)
    known = Params(params, continued(expected, [100] * 3, given))
    run |= {"drafter": OracleTree()}
    for count in (40, 100):
        out = speculative_generate(known, given, KEY, **run, max_new_tokens=count)
        np.testing.assert_array_equal(out.tokens, expected[:, :count])


@pytest.mark.slow
@pytest.mark.parametrize("prompt_length", [10, 24])
def test_texts_under_a_dynamic_rope_are_those_of_transformers(tmp_path, prompt_length):
    """Beyond 16 positions the frequencies grow with the text; one of the prompts is longer."""
    torch = pytest.importorskip("torch")
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    theirs = checkpoints.build(max_position_embeddings=16, rope_parameters=rope)
    config = read_config(checkpoints.save(tmp_path / "target", theirs))
    given = np.random.default_rng(1).integers(3, 61, (1, prompt_length))
    theirs.generation_config.eos_token_id = None
    said = theirs.generate(torch.from_numpy(given), max_new_tokens=38, do_sample=False)
    params = Params(load_transformer(tmp_path / "target", config, jnp.float32))
    engine = Engine(Transformer(config), PromptLookup(), max_new_tokens=38)
    out = engine.generate(params, from_ids(given.tolist()), KEY)
    np.testing.assert_array_equal(out.tokens, said.numpy()[:, prompt_length:])


@pytest.fixture
def watched():
    model, params = target(layers=1)
    drafter = PromptLookup(num_tokens=20)  # finds nothing in random text
    engine = Engine(Watched(model.config), drafter, max_new_tokens=6)
    PASSES.clear()
    return engine, (Params(params), prompt(1), KEY)


def test_warming_up_runs_a_pass_of_every_width_and_lowers_the_programs_that_run(watched):
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
    prefill, run = (program.compile() for program in engine.lower(params, asked, key))
    compiled = engine.generation(run(params, prefill(params, asked, key), 6))
    np.testing.assert_array_equal(compiled.tokens, generation.tokens)


def test_every_pass_is_padded_to_the_width_of_the_target(watched):
    engine, (params, asked, key) = watched
    full = Watched(engine.target.config, padded_width=24)
    plain, texts = replace(engine, drafter=Autoregressive()), []
    for own in (plain, replace(plain, target=full), replace(engine, target=full)):
        state = own.prefill(params, asked, key)
        jax.effects_barrier()
        PASSES.clear()
        texts.append(own.generation(own.run(params, state, 6)).tokens.tolist())
        if own is not plain:
            assert state.cache.num_slots == engine.num_slots(asked.tokens.shape[1])
            assert set(pass_widths()) == {24}
    assert texts[0] == texts[1] == texts[2]
