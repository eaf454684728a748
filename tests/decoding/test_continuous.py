"""Continuous batching: each continuation is its own, whatever shares the batch."""

import jax
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.decoding.continuous import QueuedPrompt, generate_many
from specjax.decoding.drafter import Params
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.decoding.generate import speculative_generate
from specjax.decoding.prompt import from_ids
from specjax.decoding.sampling import Sampling
from tests.decoding.tiny import target

NEW_TOKENS, EOS, SAMPLING = 40, (3, 17, 29), Sampling(0.8)


def asks(lengths: list[int]) -> list[QueuedPrompt]:
    numbers = np.random.default_rng(1)
    return [
        QueuedPrompt(
            number, tuple(numbers.integers(0, 40, length).tolist()), jax.random.key(number)
        )
        for number, length in enumerate(lengths)
    ]


def alone(ask: QueuedPrompt) -> list[int]:
    model, params = target()
    found = speculative_generate(
        Params(params),
        from_ids([ask.ids], 128),
        ask.key,
        target=model,
        drafter=Autoregressive(),
        sampling=SAMPLING,
        max_new_tokens=NEW_TOKENS,
        eos=EOS,
    )
    return found.tokens[0, : int(found.length[0])].tolist()


def many(waiting: list[QueuedPrompt]):
    model, params = target()
    return generate_many(
        params,
        waiting,
        target=model,
        sampling=SAMPLING,
        max_new_tokens=NEW_TOKENS,
        eos=EOS,
        batch_size=2,
    )


def test_every_continuation_is_the_one_of_its_prompt_alone():
    """Two rows serve seven prompts, of two lengths, one of which arrives late."""
    first = asks([5, 140, 9, 30, 150, 2, 64])
    late, waiting = first.pop(), list(first)
    found = {}
    for ask, tokens in many(waiting):
        if not found:
            waiting.append(late)
        found[ask.name] = tokens
    assert not waiting
    assert found == {ask.name: alone(ask) for ask in (*first, late)}
    assert len({len(tokens) for tokens in found.values()}) > 2  # they end at different times


def test_a_prompt_without_room_is_refused():
    with pytest.raises(SpecjaxError, match="exceed the model's 512 positions"):
        list(many(asks([5, 512])))
