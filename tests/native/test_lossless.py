"""Every method generates plain decoding's text from packed weights, in 16 bits too."""

import jax
import numpy as np
import pytest

import specjax
from specjax import Params, Sampling, from_ids, load, load_drafter
from specjax.loading.methods import METHODS
from specjax.models import native

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not native.is_available(), reason="specjax has no native kernels here"),
]
TEXTS = ["def area(width, height):\n    return width", "The river", "for name in names:\n    name"]


@pytest.fixture(scope="module")
def target():
    return load("pocket", "bfloat16")


def generated(target, method, temperature, texts):
    drafter, params = load_drafter(method, target)
    prompt = from_ids([target.tokenizer.encode(text) for text in texts])
    result = specjax.speculative_generate(
        Params(target.params, params),
        prompt,
        jax.random.key(3),
        target=target.model,
        drafter=drafter,
        sampling=Sampling(temperature=temperature),
        max_new_tokens=64,
    )
    return np.asarray(result.tokens)


@pytest.fixture(scope="module")
def plain(target):
    return generated(target, "plain", 0.8, TEXTS)


@pytest.mark.parametrize("method", sorted({*METHODS} - {"plain", "hass"}))
def test_a_ragged_batch_is_that_of_plain_decoding(target, plain, method):
    assert native.has_packed(target.params)
    np.testing.assert_array_equal(generated(target, method, 0.8, TEXTS), plain)


def test_a_greedy_text_is_that_of_plain_decoding_in_float16():
    """That of HASS, which drafts as EAGLE-2 does."""
    target = load("pocket", "float16")
    texts = TEXTS[:1]
    expected = generated(target, "plain", 0.0, texts)
    np.testing.assert_array_equal(generated(target, "hass", 0.0, texts), expected)


@pytest.mark.parametrize("method", ["pld", "recycling"])
def test_a_mapped_text_is_the_text_alone(target, method):
    drafter, params = load_drafter(method, target)
    engine = specjax.Engine(target.model, drafter, Sampling(temperature=0.8), max_new_tokens=8)
    prompt = from_ids([target.tokenizer.encode(TEXTS[0])])
    keys = jax.random.split(jax.random.key(3), 2)
    text = lambda key: engine.generate(Params(target.params, params), prompt, key).tokens  # noqa: E731
    np.testing.assert_array_equal(jax.vmap(text)(keys), [text(key) for key in keys])
