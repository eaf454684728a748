"""The target's features for training: those of a plain pass, text by text, and constant."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.drafter import Params
from specjax.models.cache import KVCache
from specjax.models.target import causal_rows
from specjax.models.transformer import Transformer
from specjax.training.objectives.base import target_features
from tests.decoding import tiny
from tests.decoding.heads import features_of

VOCAB = 40
LENGTHS = (7, 4, 1)  # and two slots of padding
STARTS = (0, 7, 11)
LENGTH = 14
MODEL, PARAMS = tiny.target(VOCAB)
WINDOWED = Transformer(replace(MODEL.config, sliding_window=3))

features = jax.jit(target_features, static_argnums=0)


def row(padding: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens, positions and segments of two rows, each of three texts and padding."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH))
    tokens[:, sum(LENGTHS) :] = padding
    positions = np.concatenate([*(np.arange(size) for size in LENGTHS), np.zeros(2, int)])
    segments = np.concatenate([np.repeat([1, 2, 3], LENGTHS), np.zeros(2, int)])
    return (
        jnp.asarray(tokens),
        jnp.asarray(np.stack([positions] * 2)),
        jnp.asarray(np.stack([segments] * 2)),
    )


def alone(model: Transformer, start: int, length: int) -> np.ndarray:
    """A plain pass over one text of each row, with nothing around it."""
    text = row()[0][:, start : start + length]
    return np.asarray(features_of(Params(PARAMS, None), text, model))


@pytest.mark.parametrize("model", [MODEL, WINDOWED], ids=["causal", "sliding window"])
def test_packed_texts_are_those_of_plain_passes(model):
    found = features(model, PARAMS, *row())
    for start, length in zip(STARTS, LENGTHS, strict=True):
        expected = alone(model, start, length)
        np.testing.assert_allclose(found[:, start : start + length], expected, atol=1e-5)


def test_a_sliding_window_shows():
    """Else the case above would compare nothing."""
    assert np.abs(alone(MODEL, 0, 7) - alone(WINDOWED, 0, 7)).max() > 0.1


def test_texts_that_see_each_other_would_be_caught():
    tokens, positions, segments = row()
    found = features(MODEL, PARAMS, tokens, positions, jnp.minimum(segments, 1))
    assert np.abs(found[:, 7:11] - alone(MODEL, 7, 4)).max() > 0.1


def test_padding_is_finite_and_changes_nothing():
    found, other = (features(MODEL, PARAMS, *row(padding)) for padding in (0, 5))
    np.testing.assert_array_equal(found[:, : sum(LENGTHS)], other[:, : sum(LENGTHS)])
    assert np.isfinite(found).all()


def test_features_are_what_the_lm_head_reads():
    text = row()[0][:, :7]
    cache = KVCache.create(MODEL.config, 2, 7)
    output, _ = MODEL.run(PARAMS, causal_rows(text, jnp.zeros(2, jnp.int32)), cache)
    assert output.logits is not None
    found = MODEL.logits(PARAMS, features(MODEL, PARAMS, *row())[:, :7])
    np.testing.assert_allclose(found, output.logits, atol=1e-4)


def test_no_gradient_reaches_the_target():
    gradient = jax.jit(
        jax.grad(lambda params: jnp.sum(target_features(MODEL, params, *row()) ** 2))
    )
    for leaf in jax.tree.leaves(gradient(PARAMS)):
        np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


def test_features_have_the_dtype_of_the_target():
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    found = features(MODEL, narrow, *row())
    assert found.dtype == jnp.bfloat16
    close = np.asarray(found[:, :12], np.float32) - features(MODEL, PARAMS, *row())[:, :12]
    assert np.abs(close).mean() < 0.1
