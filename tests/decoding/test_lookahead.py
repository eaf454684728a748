"""Lookahead's pool against a dictionary, its narrowest window, and what is drafted.

Golden traces show the published window.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import Engine, Params
from specjax.decoding.drafters.lookahead import EMPTY, Lookahead, insert, insert_text
from specjax.decoding.state import LoopState
from tests.decoding.contract import KEY, assert_params_rejected
from tests.decoding.rounds import proposals, rounds_of, rows_of, texts_of
from tests.decoding.tiny import BATCH, plain_pass, prompt, target

SMALL = Lookahead(ngram_length=4, window_length=3, num_guesses=2)
NARROW = Lookahead(ngram_length=5, window_length=1, num_guesses=3, pool_from_prompt=True)


@cache
def start(drafter: Lookahead) -> LoopState:
    model, params = target()
    return Engine(model, drafter, max_new_tokens=8).prefill(Params(params), prompt(), KEY)


def buckets(pool: np.ndarray) -> dict[int, list[tuple[int, ...]]]:
    """Returns the n-grams of one row's pool, newest first; empty places must lie behind."""
    held = {}
    for token, bucket in enumerate(np.asarray(pool)):
        entries = [tuple(entry.tolist()) for entry in bucket if (entry != EMPTY).all()]
        assert (bucket[len(entries) :] == EMPTY).all()
        if entries:
            held[token] = entries
    return held


def remember(pool: dict, first: int, rest: tuple[int, ...], limit: int):
    """One insertion: newest first, no repeats, and the oldest falls out."""
    bucket = [entry for entry in pool.get(first, []) if entry != rest]
    pool[first] = [rest, *bucket][:limit]


def said_after(texts: list[list[int]]) -> list[int]:
    """The target's most likely token after each text."""
    model, params = target()
    tokens = np.zeros((len(texts), 128), np.int32)
    for number, text in enumerate(texts):
        tokens[number, : len(text)] = text
    said = np.asarray(plain_pass(params, tokens, model)[0].logits).argmax(axis=-1)
    return [int(said[number, len(text) - 1]) for number, text in enumerate(texts)]


@pytest.mark.slow
def test_the_narrowest_window_and_its_pool_go_on_as_published():
    """One column: while levels are missing, it stands that many tokens of level 0 further right."""
    drafter = replace(NARROW, pool_from_prompt=False)
    model, params = target()
    played = rounds_of(Engine(model, drafter, max_new_tokens=80), Params(params))
    pools, num_levels = [{} for _ in range(BATCH)], drafter.num_levels
    for number, (before, *_, after) in enumerate(played[:14]):
        state, found, filled = before.drafter, after.drafter, min(number, num_levels)
        np.testing.assert_array_equal(found.filled, [min(number + 1, num_levels)] * BATCH)
        ahead = state.ahead[:, : num_levels - filled].tolist()
        levels = state.levels[:, :filled, 0].tolist()
        texts = texts_of(before)
        guessed = [[*text, *a, *b] for text, a, b in zip(texts, ahead, levels, strict=True)]
        for row, token in enumerate(said_after(guessed)):
            if filled == num_levels:
                ngram = (*levels[row], token)
                remember(pools[row], texts[row][-1], ngram, drafter.num_guesses)
            expected = [*levels[row][filled == num_levels :], token]
            assert found.levels[row, : len(expected), 0].tolist() == expected
            assert found.ahead[row, : len(ahead[row][1:])].tolist() == ahead[row][1:]
            assert buckets(found.pool[row]) == pools[row]
    assert (after.stats.accepted_lengths[:, 2:].sum() > 0).any(), "no draft was accepted"
    assert all(pools)


@pytest.mark.parametrize("num_guesses", [1, 3])
def test_pool_is_a_dict_that_forgets_the_least_recently_inserted(num_guesses):
    numbers, at_once = np.random.default_rng(0), 5
    pool = jnp.full((2, 4, num_guesses, 2), EMPTY)
    expected: list[dict[int, list]] = [{}, {}]
    put = jax.jit(insert)
    repeats = forgotten = same_key = 0
    for _ in range(60):
        first = numbers.integers(0, 4, (2, at_once))
        rest = numbers.integers(0, 3, (2, at_once, 2))
        counts = numbers.random((2, at_once)) < 0.7
        pool = put(pool, *map(jnp.asarray, (first, rest, counts)))
        held = jax.device_get(pool)
        for row in range(2):
            inserted = [int(token) for token in first[row][counts[row]]]
            same_key += len(set(inserted)) < len(inserted)
            for token, entry, does in zip(first[row], rest[row], counts[row], strict=True):
                bucket, entry = expected[row].get(int(token), []), tuple(entry.tolist())
                repeats += does and entry in bucket[1:]
                forgotten += does and entry not in bucket and len(bucket) == num_guesses
                if does:
                    remember(expected[row], int(token), entry, num_guesses)
            assert buckets(held[row]) == expected[row]
    assert same_key > 20 and forgotten > 20 and (repeats > 20 or num_guesses == 1)


def ngrams_of(text: list[int], length: int, limit: int) -> dict:
    pool: dict[int, list] = {}
    for at in range(len(text) - length + 1):
        first, *rest = text[at : at + length]
        remember(pool, first, tuple(rest), limit)
    return pool


@pytest.mark.parametrize("ngram_length", [3, 5])
def test_pool_from_prompt_holds_the_prompts_ngrams_and_none_of_the_padding(ngram_length):
    numbers = np.random.default_rng(1)
    length = np.array([100, 64, 33, ngram_length, ngram_length - 1])
    is_text = np.arange(100) < length[:, None]
    anything = numbers.integers(-5, 8, (5, 100))  # invalid tokens too, and negative ones
    tokens = np.where(is_text, numbers.integers(0, 5, (5, 100)), anything)
    pool = jnp.full((5, 5, 4, ngram_length - 1), EMPTY)
    pool = jax.device_get(jax.jit(insert_text)(pool, jnp.asarray(tokens), jnp.asarray(length)))
    for row, count in enumerate(length):
        assert buckets(pool[row]) == ngrams_of(tokens[row, :count].tolist(), ngram_length, 4)
    assert buckets(pool[4]) == {}


def test_pool_starts_empty_or_with_the_prompt():
    assert (start(SMALL).drafter.pool == EMPTY).all()
    state = jax.device_get(start(NARROW))
    for row, text in enumerate(texts_of(state)):
        expected = ngrams_of(text, NARROW.ngram_length, NARROW.num_guesses)
        assert buckets(state.drafter.pool[row]) == expected


def test_the_roots_ngrams_are_drafted_newest_first_on_shared_rows():
    state = start(SMALL)
    guesses = np.array([[[3, 4, 5], [3, 4, 6]], [[1, 2, 3], [2, 2, 2]], [[7, 8, 9], [EMPTY] * 3]])
    pool = np.full(state.drafter.pool.shape, EMPTY)
    for row, entries in enumerate(guesses):
        pool[row, texts_of(state)[row][-1]] = entries
    state = replace(state, drafter=replace(state.drafter, pool=jnp.asarray(pool)))
    engine, params = Engine(target()[0], SMALL, max_new_tokens=8), Params(target()[1])
    [tree] = proposals(engine, params, [state])
    drafted = [row[1:] for row in rows_of(tree.tokens, tree.valid.sum(axis=1))]
    assert drafted == [[3, 4, 5, 6], [1, 2, 3, 2, 2, 2], [7, 8, 9]]
    assert tree.parents[0, :5].tolist() == [-1, 0, 1, 2, 2]
    assert tree.depth[1, :7].tolist() == [0, 1, 2, 3, 1, 2, 3]


def test_defaults_are_those_published_for_7b_models():
    assert Lookahead() == Lookahead(5, 7, 7, pool_from_prompt=False)
    assert (Lookahead().num_nodes, Lookahead().num_probes, Lookahead().max_depth) == (29, 27, 4)


def test_params_of_another_drafter_are_rejected():
    assert_params_rejected(SMALL, {"weight": 1}, "Lookahead has no params but was given some")
