"""Logits that are NaN or infinite end a row, and are reported."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.core.errors import SpecjaxError
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.sampling import Sampling
from tests.decoding.tiny import prompt, target

POISONED = 7  # a token whose embedding is damaged
NEW_TOKENS = 32


def generate(value: float, sampling: Sampling, run=specjax.speculative_generate):
    model, params = target(layers=1)
    table = params["embed_tokens"]["weight"]
    params = params | {"embed_tokens": {"weight": table.at[POISONED].set(value)}}
    key = jax.random.key(2)
    make = partial(run, target=model, drafter=PromptLookup(num_tokens=4), sampling=sampling)
    return make(specjax.Params(params), prompt(3), key, max_new_tokens=NEW_TOKENS)


@pytest.mark.parametrize(
    "value, sampling",
    [
        (jnp.nan, Sampling()),
        pytest.param(jnp.inf, Sampling(1.0, top_p=0.9), marks=pytest.mark.slow),
        pytest.param(jnp.inf, Sampling(1.0, verification="rejection"), marks=pytest.mark.slow),
    ],
)
def test_a_row_with_logits_that_are_not_finite_ends_and_is_reported(value, sampling):
    out = jax.device_get(generate(value, sampling))
    has_poison = [POISONED in row for row in np.asarray(prompt(3).tokens).tolist()]
    for row in range(3):
        tokens = out.tokens[row, : out.length[row]]
        if out.is_finite[row]:
            assert not has_poison[row]
            assert POISONED not in tokens[:-1]
        else:
            assert len(tokens) < NEW_TOKENS
    with pytest.raises(SpecjaxError, match="logits are NaN or infinite"):
        out.check()


def test_streaming_stops_with_the_error():
    with pytest.raises(SpecjaxError, match="NaN or infinite"):
        list(generate(jnp.nan, Sampling(), run=specjax.stream))
