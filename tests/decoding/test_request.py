"""Invalid requests raise a one-line error before anything is compiled."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.decoding import Params, Prompt, Sampling, reference_generate
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.drafters.prompt_lookup_plus import PromptLookupPlus
from specjax.decoding.generate import speculative_generate, stream
from specjax.decoding.prompt import encode, from_ids
from specjax.decoding.request import end_tokens
from specjax.models.config import Rope
from specjax.models.transformer import Transformer
from tests.decoding.tiny import prompt, target


def request(**changes):
    """A good request with `changes`."""
    model, params = target()
    good = {"params": Params(params), "prompt": prompt(1), "key": jax.random.key(0)}
    return good | {"target": model, "drafter": PromptLookup(), "max_new_tokens": 4} | changes


def assert_rejected(message: str, run, **given):
    """Asserts that `run` raises one line that contains `message`."""
    with pytest.raises(SpecjaxError) as caught:
        run(**given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def of_length(*lengths: int, token: int = 1) -> Prompt:
    return from_ids([[token] * length for length in lengths], bucket=8)


PARAMS = target()[1]
FACTORS = {"short_factor": (1.0,) * 4, "long_factor": (2.0,) * 4}
ROPE = Rope("longrope", original_max_position_embeddings=64, **FACTORS)
LONGROPE = Transformer(replace(target()[0].config, rope=ROPE))
BAD = {
    "one token": ({"prompt": of_length(5, 1)}, "prompt 1 has 1 token(s)"),
    "length beyond the tokens": (
        {"prompt": Prompt(jnp.ones((1, 8), int), jnp.array([9]))},
        "prompt 0 has length 9 but only 8 tokens",
    ),
    "token beyond the vocabulary": (
        {"prompt": of_length(3, token=40)},
        "prompt 0 holds token id 40",
    ),
    "too long": (
        {"prompt": of_length(500, 2), "max_new_tokens": 13},
        "500 prompt tokens + 13 new ones exceed the model's 512 positions",
    ),
    "too long for its table of LongRoPE": (
        {"target": LONGROPE, "prompt": of_length(65, 60), "max_new_tokens": 5},
        "60 prompt tokens + 5 new ones exceed 64 positions, where LongRoPE changes its table",
    ),
    "no new tokens": ({"max_new_tokens": 0}, "max_new_tokens 0 must be at least 1"),
    "other vocabulary": (
        {"params": Params(PARAMS | {"embed_tokens": {"weight": jnp.ones((6, 32))}})},
        "the model's params do not fit it (wrong shape: embed_tokens.weight is ",
    ),
    "other layers": (
        {"params": Params({name: PARAMS[name] for name in PARAMS if name != "layers_1"})},
        "the model's params do not fit it (missing: layers_1.",
    ),
    "no params": ({"params": Params(None)}, "the model's params do not fit it (missing: "),
    "params for a drafter without": (
        {"params": Params(PARAMS, {"weight": 1})},
        "PromptLookup has no params but was given some",
    ),
    "missing layer": ({"drafter": PromptLookupPlus(layer=3)}, "hidden layer 3 does not exist"),
    "too little memory": (
        {"drafter": PromptLookup(num_tokens=10**6)},
        "a pass of 1000001 tokens for 1 sequence(s) needs at least",
    ),
    "a draft wider than its pass": (
        {"target": target()[0].clone(padded_width=8)},
        "11 tokens, more than padded_width 8",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_an_invalid_request_is_rejected_before_compilation(case):
    changes, message = BAD[case]
    given = request(**changes)
    assert_rejected(message, speculative_generate, **given)
    assert_rejected(message, lambda **given: next(stream(**given)), **given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        BAD["too long"],
        BAD["no params"],
        ({"key": jax.random.split(jax.random.key(0), 3)}, "not one for each of 1 sequence(s)"),
        ({"sampling": Sampling(logit_bias={40: 1.0})}, "logit_bias holds token id 40"),
        ({"processor_params": (1,)}, "1 entries for 0 processors"),
    ],
)
def test_the_reference_rejects_what_the_methods_reject(changes, message):
    given = request(**changes)
    del given["drafter"]
    assert_rejected(message, reference_generate, **given | {"params": given["params"].target})


ENCODE = partial(encode, lambda text: {"input_ids": [1, *map(len, text.split())]})


@pytest.mark.parametrize(
    ("run", "given", "message"),
    [
        (from_ids, [], "no prompts given"),
        (from_ids, [[1, 2], []], "prompt 1 is empty; give at least 2 tokens"),
        (from_ids, [[1, -(2**63)]], "prompt 0 holds -9223372036854775808, beyond any vocabulary"),
        (ENCODE, "a text", "takes a list of texts; wrap the single text in"),
        (ENCODE, ["a text", ""], "prompt 1 is empty; write some text"),
        (ENCODE, [], "no prompts given"),
    ],
)
def test_values_that_are_not_prompts_are_rejected(run, given, message):
    assert_rejected(message, lambda: run(given))


def test_a_request_at_the_limit_passes():
    longest, drafter = of_length(500, 2, token=39), PromptLookupPlus(layer=2)
    given = request(prompt=longest, max_new_tokens=12, drafter=drafter)
    made = jax.eval_shape(lambda: speculative_generate(**given))
    assert made.tokens.shape == (2, 12)


def test_traced_prompts_are_checked_for_their_shapes_alone():
    given = request()

    def run(tokens, **changes):
        return speculative_generate(**given | {"prompt": Prompt(tokens, jnp.array([9]))} | changes)

    invalid = jnp.full((1, 32), 40)
    with pytest.raises(SpecjaxError):
        run(invalid)
    assert jax.eval_shape(run, invalid).tokens.shape == (1, 4)
    for case in ("no new tokens", "other vocabulary", "other layers"):
        changes, message = BAD[case]
        assert_rejected(message, partial(jax.eval_shape, partial(run, **changes), invalid))


@pytest.mark.parametrize(
    "eos, message",
    [
        ("</s>", "does not hold token ids; pass target.eos"),
        (-1, "eos -1 is outside the vocabulary of 40 .*; pass target.eos"),
        ((2, 40), "eos 40 is outside the vocabulary"),
    ],
)
def test_eos_outside_the_vocabulary_is_rejected(eos, message):
    with pytest.raises(SpecjaxError, match=message):
        end_tokens(eos, target()[0])
    for tokens in (3, [3, 3], (3,), np.array([3])):
        assert end_tokens(tokens, target()[0]) == (3,)


def test_a_tree_larger_than_num_nodes_is_rejected():
    @dataclass(frozen=True)
    class TooLarge(PromptLookup):
        num_nodes = 2

    message = "drafted a tree of 11 nodes, but its num_nodes is 2;"
    assert_rejected(message, speculative_generate, **request(drafter=TooLarge()))
