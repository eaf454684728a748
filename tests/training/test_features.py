"""The target's features for training: those of a plain pass, text by text, and constant."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.drafter import Params
from specjax.models.transformer import Transformer
from specjax.training.objectives.base import hidden_states
from tests.decoding import tiny
from tests.decoding.heads import features_of
from tests.training.cases import ALONE, EXAMPLES, VOCAB, batch_of, each_alone

MODEL, PARAMS = tiny.target(VOCAB)
WINDOWED = Transformer(replace(MODEL.config, sliding_window=3))


def features(model=MODEL, params=PARAMS, **changes):
    """Features of two rows, which hold one text, two texts, and padding."""
    batch = batch_of() | changes
    places = (jnp.asarray(batch[name]) for name in ("tokens", "positions", "segments"))
    read = jax.jit(hidden_states, static_argnums=(0, 2))
    return read(model, params, (-1,), *places)[:, :, 0]


def alone(model: Transformer) -> list[np.ndarray]:
    """A plain pass over each text, with nothing around it."""
    found = features_of(Params(PARAMS, None), jnp.asarray(batch_of(ALONE)["tokens"]), model)
    return [np.asarray(row[: len(each.tokens)]) for row, each in zip(found, EXAMPLES, strict=True)]


def test_packed_texts_are_those_of_plain_passes():
    for model in (MODEL, WINDOWED):
        for found, expected in zip(each_alone(features(model)), alone(model), strict=True):
            np.testing.assert_allclose(found[: len(expected)], expected, atol=1e-5)
    assert np.abs(alone(MODEL)[0] - alone(WINDOWED)[0]).max() > 0.1  # the window shows


def test_texts_that_see_each_other_would_be_caught():
    merged = each_alone(features(segments=np.minimum(batch_of()["segments"], 1)))
    assert np.abs(merged[2][:4] - alone(MODEL)[2]).max() > 0.1


def test_no_gradient_reaches_the_target():
    gradient = jax.grad(lambda params: jnp.sum(features(params=params) ** 2))(PARAMS)
    for leaf in jax.tree.leaves(gradient):
        np.testing.assert_array_equal(leaf, np.zeros_like(leaf))
