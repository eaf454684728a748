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


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def target(request):
    return load("pocket", request.param)


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
        max_new_tokens=96,
    )
    return np.asarray(result.tokens)


@pytest.fixture(scope="module")
def plain(target):
    return {
        (temperature, count): generated(target, "plain", temperature, TEXTS[:count])
        for temperature in (0.0, 0.8)
        for count in (1, 3)
    }


@pytest.mark.parametrize("method", [name for name in METHODS if name != "plain"])
def test_the_text_is_that_of_plain_decoding(target, plain, method):
    assert native.has_packed(target.params)
    for (temperature, count), expected in plain.items():
        tokens = generated(target, method, temperature, TEXTS[:count])
        np.testing.assert_array_equal(tokens, expected)
