"""EAGLE's noise, the weight of packed texts, and the logits of each chunk."""

import jax
import numpy as np
import pytest

from specjax.training.objectives.eagle import EagleTraining
from tests.training.cases import (
    ALONE,
    CASES,
    EXAMPLES,
    FROZEN,
    KEY,
    NOISE,
    assert_same,
    batch_of,
    clean_features,
    counted,
    each_alone,
    measure_of,
    noisy_features,
)

CLEAN = EagleTraining(feature_weight=0.7, logit_weight=0.3, noise=0.0)


def test_the_defaults_are_the_published_ones():
    assert EagleTraining() == EagleTraining(feature_weight=1.0, logit_weight=0.1, noise=0.2)


def test_packed_texts_weigh_as_many_slots_as_they_count():
    case = CASES["eagle"]

    def loss_and_gradient(batch):
        (loss, _), gradient = measure_of(CLEAN, case.head)(case.params, FROZEN, batch, KEY)
        return loss, gradient

    losses, gradients = zip(*(loss_and_gradient(batch_of((row, ()))) for row in ALONE), strict=True)
    shares = np.bincount([text for text, _ in counted()]).astype(np.float32)
    shares /= shares.sum()
    gradient = jax.tree.map(
        lambda *leaves: sum(share * leaf for share, leaf in zip(shares, leaves, strict=True)),
        *gradients,
    )
    expected = (np.dot(shares, np.asarray(losses)), gradient)
    assert_same(loss_and_gradient(batch_of()), expected)


# ---- Noise ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [0.2, NOISE])
def test_noise_is_uniform_and_narrower_in_longer_texts(width):
    """`width` from end to end at 512 tokens, so half of it to each side."""
    noise = each_alone(noisy_features(width)) - clean_features()
    for example, own in zip(EXAMPLES, noise, strict=True):
        length = len(example.tokens)
        own = own[:length] / (width * 512 / length)
        assert np.abs(own).max() <= 0.5 + 1e-4
        # Of 128 numbers or more: the largest, their mean and their spread, as of a uniform law.
        assert min(own.max(), -own.min()) > 0.45
        assert abs(own.mean()) < 4 * 12**-0.5 / own.size**0.5
        np.testing.assert_allclose(own.std(), 12**-0.5, rtol=0.15)
        assert len(np.unique(own)) > 0.99 * own.size


def test_noise_of_no_width_is_none_and_only_features_carry_noise():
    """The definition in `test_objectives.py` has clean features to learn; here noise is large."""
    np.testing.assert_allclose(each_alone(noisy_features(0.0)), clean_features(), atol=1e-5)
    assert np.abs(noisy_features(0.2) - noisy_features(0.0)).max() > 1
