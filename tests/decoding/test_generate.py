"""Requests as programs: what compiles once, what is cut short, and what a batch is."""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.drafter import Params
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.drafters.prompt_lookup_plus import PromptLookupPlus
from specjax.decoding.engine import Engine
from specjax.decoding.generate import speculative_generate
from specjax.decoding.prompt import from_ids
from specjax.decoding.reference import reference_generate
from specjax.models.config import Rope
from specjax.models.families import read_config
from specjax.models.io.huggingface import load_transformer
from specjax.models.transformer import Transformer
from tests.decoding.contract import KEY, SAMPLINGS, truth
from tests.decoding.tiny import BATCH, OracleTree, prompt, target
from tests.models import checkpoints


def test_max_rounds_cuts_the_text_and_compiles_nothing():
    (model, params), given = target(), prompt()
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def generate(max_rounds):
        settings = {"target": model, "drafter": PromptLookup(), "max_new_tokens": 64}
        return speculative_generate(Params(params), given, KEY, **settings, max_rounds=max_rounds)

    whole = generate(64)
    for max_rounds in (1, 5):
        cut = generate(max_rounds)
        np.testing.assert_array_equal(cut.stats.rounds, [max_rounds] * BATCH)
        for row in range(BATCH):
            length = int(cut.length[row])
            assert max_rounds <= length < whole.length[row]
            np.testing.assert_array_equal(cut.tokens[row, :length], whole.tokens[row, :length])


@pytest.mark.parametrize("prompt_length, padded", [(64, 64), (128, 128), (192, 256)])
def test_slots_are_those_of_text_and_round_each_rounded_up(prompt_length, padded):
    engine = Engine(target()[0], PromptLookup(num_tokens=10), max_new_tokens=100)
    assert engine.num_slots(prompt_length) == -(-(padded + 100) // 128) * 128 + 128


def test_a_sequence_of_a_batch_equals_its_prompt_alone():
    """Also with a dynamic RoPE, which depends on how long each text is: 45 to 70 tokens."""
    model, params = target()
    config = replace(model.config, max_position_embeddings=48, rope=Rope("dynamic", factor=2.0))
    batch = prompt()
    run = partial(
        speculative_generate,
        target=Transformer(config),
        drafter=PromptLookupPlus(layer=1),
        sampling=SAMPLINGS["sampled"],
        max_new_tokens=40,
    )
    together = run(Params(params), batch, KEY)
    for row in range(BATCH):
        bucket = 32 if row else 1  # the padding must not count
        alone = from_ids([batch.tokens[row, : batch.length[row]].tolist()], bucket)
        out = run(Params(params), alone, jax.random.fold_in(KEY, row))
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
    texts = jnp.pad(given.tokens, ((0, 0), (0, 100)))
    for row, length in enumerate(given.length.tolist()):
        texts = texts.at[row, length : length + 100].set(expected[row])
    known, run = Params(params, texts), run | {"drafter": OracleTree()}
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
    out = speculative_generate(
        Params(load_transformer(tmp_path / "target", config, jnp.float32)),
        from_ids(given.tolist()),
        KEY,
        target=Transformer(config),
        drafter=PromptLookup(),
        max_new_tokens=38,
    )
    np.testing.assert_array_equal(out.tokens, said.numpy()[:, prompt_length:])


def test_users_jit_the_engines_generate():
    model, params = target()
    engine = Engine(model, PromptLookup(), max_new_tokens=40)
    outer = jax.jit(engine.generate, donate_argnums=0)
    tokens = outer(Params(jax.tree.map(jnp.copy, params)), prompt(), KEY).tokens
    np.testing.assert_array_equal(tokens, truth("greedy", BATCH)[:, :40])


def test_fifty_prompts_of_one_bucket_trace_once():
    model, params = target()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def run(params, prompt, key):
        settings = {"target": model, "drafter": PromptLookup(), "max_new_tokens": 20}
        return speculative_generate(params, prompt, key, **settings)

    numbers = np.random.default_rng(0)
    for _ in range(50):
        ids = numbers.integers(0, 40, numbers.integers(2, 33)).tolist()
        out = run(Params(params), from_ids([ids], bucket=32), jax.random.key(0))
        assert out.length == 20
    with pytest.raises(AssertionError, match="traced"):
        run(Params(params), from_ids([[1] * 40], bucket=32), jax.random.key(0))
