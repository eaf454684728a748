"""Continuous batching: each continuation is its own, whatever shares the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.decoding import Engine, Params, Sampling
from specjax.decoding.continuous import Batch, QueuedPrompt, generate_many
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.decoding.drafters.eagle2 import Eagle2
from specjax.decoding.prompt import from_ids
from tests.decoding.heads import eagle_head, narrowed
from tests.decoding.tiny import target

NEW_TOKENS, EOS, SAMPLING = 40, (3, 17, 29), Sampling(0.8)


def prompts(lengths: list[int]) -> list[QueuedPrompt]:
    numbers = np.random.default_rng(1)
    ids = [tuple(numbers.integers(0, 40, length).tolist()) for length in lengths]
    return [QueuedPrompt(seed, tokens, jax.random.key(seed)) for seed, tokens in enumerate(ids)]


SETTINGS = {"sampling": SAMPLING, "max_new_tokens": NEW_TOKENS, "eos": EOS}


def alone(prompt: QueuedPrompt) -> list[int]:
    model, params = target()
    engine, weights = Engine(model, Autoregressive(), **SETTINGS), Params(params)
    state = engine.prefill(weights, from_ids([prompt.ids], 128), prompt.key)
    out = engine.generation(engine.run(weights, state, NEW_TOKENS))
    return out.tokens[0, : int(out.length[0])].tolist()


def many(queue: list[QueuedPrompt]):
    model, params = target()
    return generate_many(params, queue, target=model, batch_size=2, **SETTINGS)


def test_every_continuation_equals_that_of_its_prompt_alone():
    """A batch of two serves six prompts, of two lengths, one of which arrives late."""
    first = prompts([5, 140, 9, 150, 2, 64])
    late, queue = first.pop(), list(first)
    continuations = {}
    for prompt, tokens in many(queue):
        if not continuations:
            queue.append(late)
        continuations[prompt.name] = tokens
    assert not queue
    assert continuations == {prompt.name: alone(prompt) for prompt in (*first, late)}
    assert len(set(map(len, continuations.values()))) > 2  # they end at different times


def test_every_prompt_is_checked():
    with pytest.raises(SpecjaxError, match="exceed the model's 512 positions"):
        list(many(prompts([512])))
    with pytest.raises(SpecjaxError, match="token id 999, outside the vocabulary"):
        list(many([*prompts([5]), QueuedPrompt("bad", (1, 999), jax.random.key(0))]))


def test_a_head_with_a_draft_vocabulary_drafts_in_a_batch_as_alone():
    """The LM head's part for the draft vocabulary belongs to no sequence."""
    model, params = target(layers=1)
    head, known = narrowed(eagle_head(layers=1))
    drafter = Eagle2(head, top_k=2, depth=2, num_tokens=5)
    engine = Engine(model, drafter, max_new_tokens=16)
    weights = Params(params, known)
    batch = Batch(engine, weights, 2)
    alone = []
    for place, prompt in enumerate(prompts([9, 14])):
        state = engine.prefill(weights, from_ids([prompt.ids], 128), prompt.key)
        batch.put(place, jax.tree.map(jnp.copy, state))
        alone.append(engine.generation(engine.run(weights, state, 99)))
    for _ in range(16):
        together, is_done = batch.run(2)
    assert is_done.all()
    for place, one in enumerate(alone):
        np.testing.assert_array_equal(together.tokens[place], one.tokens[0])
        assert together.stats.rounds[place] == one.stats.rounds[0]
        assert together.stats.accepted[place] == one.stats.accepted[0]


def test_the_place_of_a_text_that_ran_alone_is_free_and_the_text_can_be_read():
    model, params = target()
    engine, weights = Engine(model, Autoregressive(), **SETTINGS), Params(params)
    first, second = prompts([9, 14])
    states = [engine.prefill(weights, from_ids([p.ids], 128), p.key) for p in (first, second)]
    batch = Batch(engine, weights, 2)
    batch.put(0, states[0])
    batch.run(2)
    prefix = batch.end(0)
    batch.put(1, states[1])
    assert batch.run(1)[1][0], "the first text goes on"
    together, is_done = batch.run(NEW_TOKENS)
    assert is_done.all()
    assert together.tokens[1, : int(together.length[1])].tolist() == alone(second)
    assert prefix.tokens[0, : len(first.ids)].tolist() == list(first.ids)
