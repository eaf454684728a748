"""Logits that are NaN or infinite end a row, and are reported."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.core.errors import SpecjaxError
from specjax.decoding import Processor, Sampling
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from tests.decoding.tiny import Oracle, prompt, slow_except, target

POISONED = 7  # a token whose embedding is damaged
NEW_TOKENS = 32


def poisoned(value: float):
    model, params = target(layers=1)
    table = params["embed_tokens"]["weight"].at[POISONED].set(value)
    return model, params | {"embed_tokens": {"weight": table}}


def generate(value: float, sampling: Sampling, run=specjax.speculative_generate):
    model, params = poisoned(value)
    settings = {"sampling": sampling, "max_new_tokens": NEW_TOKENS}
    drafter, request = PromptLookup(num_tokens=4), specjax.Params(params)
    return run(request, prompt(3), jax.random.key(2), target=model, drafter=drafter, **settings)


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


@dataclass(frozen=True)
class AllBanned(Processor):
    """Allows no token after the first new ones."""

    first: int = 4

    def apply(self, arrays, logits, state, nodes):
        return jnp.where((nodes.num_new >= self.first)[..., None], -jnp.inf, logits)


@pytest.mark.parametrize("temperature", slow_except([0.0, 0.9], 0.9))
def test_a_draft_beyond_the_end_changes_nothing(temperature):
    model, params = target(layers=1)
    given, sampling = prompt(1), Sampling(temperature, processors=(AllBanned(),))
    key, start = jax.random.key(1), int(prompt(1).length[0])
    run = partial(specjax.speculative_generate, target=model, sampling=sampling)
    plain = run(specjax.Params(params), given, key, drafter=Autoregressive(), max_new_tokens=12)
    tokens = plain.tokens[0, :4].tolist()
    assert plain.length == 4 and not plain.is_finite
    # The draft goes on with zeros, of which `argmax` takes the first where all are banned.
    text = jnp.asarray([[*given.tokens[0, :start].tolist(), *tokens, *[0] * 8]])
    drafted = partial(run, specjax.Params(params, text), given, key, drafter=Oracle(max_depth=6))
    for new, eos, is_finite in ((12, None, False), (4, None, True), (12, tokens[3], True)):
        out = drafted(max_new_tokens=new, eos=eos)
        assert out.tokens[0, : int(out.length[0])].tolist() == tokens
        assert bool(out.is_finite[0]) == is_finite


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_a_rejected_node_that_is_not_finite_changes_nothing(value):
    model, params = poisoned(value)
    given = specjax.from_ids([[1, 4, 2, 4, 2, 9]])
    run = partial(specjax.speculative_generate, target=model, max_new_tokens=12)
    plain = run(specjax.Params(params), given, jax.random.key(0), drafter=Autoregressive())
    assert plain.is_finite and POISONED not in plain.tokens[0]
    draft = specjax.Params(params, jnp.full((1, 32), POISONED))
    out = run(draft, given, jax.random.key(0), drafter=Oracle(max_depth=2))
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert out.is_finite


@pytest.mark.parametrize("drafter", [Autoregressive(), Oracle(max_depth=2)])
def test_values_that_overflow_float16_end_the_text_of_their_own_node_alone(drafter):
    model, params = target(layers=1)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), params)
    table = params["embed_tokens"]["weight"].at[:, 0].set(0).at[POISONED].set(0)
    params["embed_tokens"]["weight"] = table.at[POISONED, 0].set(1)
    values = params["layers_0"]["self_attn"]["v_proj"]
    values["weight"] = values["weight"].at[:, 0].set(6e4)
    given, drafts = specjax.from_ids([[1, 4, 2, 4, 2, 9]]), jnp.full((1, 32), POISONED)
    run = partial(
        specjax.speculative_generate,
        specjax.Params(params, None if drafter == Autoregressive() else drafts),
        given,
        jax.random.key(0),
        target=model,
        drafter=drafter,
        max_new_tokens=12,
    )
    rejected = run(sampling=Sampling(logit_bias=((POISONED, -1e4),)))
    assert rejected.is_finite and rejected.length == 12
    accepted = run(sampling=Sampling(logit_bias=((POISONED, 1e4),)))
    assert accepted.tokens[0, : int(accepted.length[0])].tolist() == [POISONED]
    assert not accepted.is_finite
