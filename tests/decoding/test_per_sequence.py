"""Settings per sequence: each generates the tokens that it generates alone, in one program."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.decoding import Engine, Params, Sampling, reference_generate
from specjax.decoding.per_sequence import per_sequence
from specjax.decoding.sampling import PerSequenceSampling
from tests.decoding.contract import generate
from tests.decoding.test_contract import of_method
from tests.decoding.tiny import prompt, target

VOCAB, LIMITS = 40, {"max_new_tokens": 24, "eos": (17,)}
SHARED = {"bad_words": ((5, 3),), "logprobs": 2}
SAMPLINGS = (
    Sampling(0.7, top_p=0.9, repetition_penalty=1.6, **SHARED),
    Sampling(0.0, frequency_penalty=0.6, min_new_tokens=12, **SHARED),
    Sampling(1.3, 7, 1.0, min_p=0.1, logit_bias={3: 2.0, 9: -4.0}, presence_penalty=0.8, **SHARED),
)
ORDERS = (0, 1, 2), (2, 0, 1)
KEYS = jnp.stack([jax.random.key(number) for number in (3, 11, 7)])


@cache
def alone(number: int, sampling: Sampling) -> tuple[np.ndarray, int]:
    """Tokens of one prompt with its own settings and key, by their definitions."""
    model, params = target(layers=1)
    one = jax.tree.map(lambda leaf: leaf[number : number + 1], prompt())
    out = reference_generate(params, one, KEYS[number], target=model, sampling=sampling, **LIMITS)
    return np.asarray(out[0][0]), int(out[1][0])


def test_each_sequence_generates_the_tokens_that_it_generates_alone():
    """Those of all methods with values per sequence are in test_processors.py."""
    drafter, known = of_method("recycling")
    programs = set()
    for order in ORDERS:
        samplings = [SAMPLINGS[number] for number in order]
        sampling, values = per_sequence(samplings, VOCAB)
        programs.add((sampling, jax.tree.structure(values)))
        out = generate(
            drafter, known, key=KEYS, values=values, layers=1, sampling=sampling, **LIMITS
        )
        for number, sampling in enumerate(samplings):
            tokens, length = alone(number, sampling)
            np.testing.assert_array_equal(out.tokens[number], tokens)
            assert out.length[number] == length
        assert out.from_draft.any(), "no draft was ever right"
    assert len(programs) == 1


def test_values_filter_logits_as_settings_do():
    sampling, values = per_sequence(SAMPLINGS, VOCAB)
    logits = 3 * jax.random.normal(jax.random.key(1), (3, 5, VOCAB))
    filter_all = jax.jit(Sampling.filtered, static_argnums=0)
    filtered = np.asarray(filter_all(sampling, logits, values))
    for number, one in enumerate(SAMPLINGS):
        expected = np.asarray(filter_all(one, logits))[number]
        np.testing.assert_array_equal(np.isfinite(filtered[number]), np.isfinite(expected))
        np.testing.assert_allclose(filtered[number], expected, rtol=1e-6)
    np.testing.assert_array_equal(filter_all(sampling, logits[:, 0], values), filtered[:, 0])


def test_the_highest_temperature_leaves_bans_alone():
    sampling, values = per_sequence([Sampling(1e38)], VOCAB)
    logits = jnp.zeros((1, VOCAB)).at[0, 3].set(-jnp.inf)
    for each in (Sampling(1e39).filtered(logits), sampling.filtered(logits, values)):
        np.testing.assert_array_equal(np.isfinite(each[0]), np.arange(VOCAB) != 3)


def test_values_round_as_the_constants_of_settings_do():
    settings = [Sampling(0.7, repetition_penalty=1.6), Sampling(0.3, repetition_penalty=1.1)]
    sampling, values = per_sequence(settings, VOCAB)
    logits = jax.random.normal(jax.random.key(1), (2, 500, VOCAB)) * 3
    counts = jnp.ones_like(logits, jnp.int32)

    def controlled(one: Sampling, values, logits, counts):
        [penalties] = one.all_processors
        in_prompt = jnp.zeros_like(counts, bool)
        logits = penalties._penalised(values, logits, counts, in_prompt)
        return one.filtered(logits, values)

    together = jax.jit(controlled, static_argnums=0)(sampling, values, logits, counts)
    for number, one in enumerate(settings):
        alone = jax.jit(controlled, static_argnums=0)(one, None, logits, counts)
        np.testing.assert_array_equal(together[number], alone[number])


def test_controls_that_all_sequences_leave_off_stay_out_of_the_program():
    sampling, values = per_sequence([Sampling(), Sampling(top_k=VOCAB)], VOCAB)
    assert sampling == PerSequenceSampling()
    assert values.logit_bias is None
    assert per_sequence([Sampling(min_p=0.1), Sampling()], VOCAB)[0] == PerSequenceSampling(
        min_p=0.5
    )


@pytest.mark.parametrize(
    ("samplings", "message"),
    [
        ([Sampling(), Sampling(bad_words=((1,),))], "`bad_words` differs between the sequences"),
        ([Sampling(), Sampling(logprobs=1)], "`logprobs` differs between the sequences"),
        ([Sampling(0.5, verification="rejection")] * 2, "`verification` must be coupled"),
        ([Sampling(logit_bias={VOCAB: 1.0})], "logit_bias holds token id 40, outside"),
    ],
)
def test_settings_that_sequences_cannot_have_alone_are_rejected(samplings, message):
    with pytest.raises(SpecjaxError, match=message):
        per_sequence(samplings, VOCAB)


def test_values_and_keys_for_another_batch_are_rejected():
    model, params = target()
    drafter, known = of_method("pld")
    sampling, values = per_sequence(SAMPLINGS[:2], VOCAB)
    engine = Engine(model, drafter, sampling, max_new_tokens=4)
    with pytest.raises(SpecjaxError, match="values for 2 sequences, the prompt has 3"):
        engine.generate(Params(params, known, sampling=values), prompt(), KEYS)
    sampling, values = per_sequence(SAMPLINGS, VOCAB)
    engine = Engine(model, drafter, sampling, max_new_tokens=4)
    with pytest.raises(SpecjaxError, match="not one for each of 3 sequence"):
        engine.generate(Params(params, known, sampling=values), prompt(), KEYS[:2])
    with pytest.raises(SpecjaxError, match="pass both"):
        engine.generate(Params(params, known), prompt(), KEYS)
    with pytest.raises(SpecjaxError, match="pass both"):
        Engine(model, drafter, SAMPLINGS[0]).generate(
            Params(params, known, sampling=values), prompt(), KEYS
        )
    _, larger = per_sequence(SAMPLINGS, VOCAB + 8)
    with pytest.raises(SpecjaxError, match="biases for 48 tokens, the target has 40"):
        engine.generate(Params(params, known, sampling=larger), prompt(), KEYS)
    engine = Engine(model, drafter, replace(sampling, verification="rejection"), max_new_tokens=4)
    with pytest.raises(SpecjaxError, match="needs coupled verification"):
        engine.generate(Params(params, known, sampling=values), prompt(), KEYS)
    with pytest.raises(SpecjaxError, match="there are no samplings"):
        per_sequence([], VOCAB)
