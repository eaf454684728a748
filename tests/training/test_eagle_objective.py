"""EAGLE's loss and gradient against their definition; packing, padding, noise and precision."""

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from specjax.training.objectives import eagle
from specjax.training.objectives import slots as slot_values
from specjax.training.objectives.eagle import eagle_loss
from specjax.training.objectives.options import EagleObjective
from tests.training.literal import (
    ALONE,
    EXAMPLES,
    FROZEN,
    HEAD,
    KEY,
    NOISE,
    PACKED,
    PARAMS,
    TARGET,
    VOCAB,
    assert_same,
    batch_of,
    clean_features,
    counted,
    definition,
    each_alone,
    slots_of,
)
from tests.training.objective_checks import (
    check_bfloat16_target,
    check_no_slot,
    check_other_slots,
    check_padding,
    check_recomputing,
    measure_of,
)

# Weights that are not the defaults, so that a weight that is not read shows.
SETTINGS = EagleObjective(feature_weight=0.7, logit_weight=0.3, noise=NOISE)
CLEAN = EagleObjective(feature_weight=0.7, logit_weight=0.3, noise=0.0)


@cache
def measure(settings: EagleObjective = SETTINGS):
    return measure_of(eagle_loss(HEAD, TARGET, settings))


def loss_and_gradient(batch: Any, settings: EagleObjective):
    (loss, _), gradient = measure(settings)(PARAMS, FROZEN, batch, KEY)
    return loss, gradient


def test_the_defaults_are_the_published_ones():
    assert EagleObjective() == EagleObjective(feature_weight=1.0, logit_weight=0.1, noise=0.2)


# ---- The definition ------------------------------------------------------------------------------


def test_loss_and_gradient_are_those_of_the_definition():
    """Of packed and padded rows, noise and all; the definition looks at one text at a time."""
    expected = definition(SETTINGS, each_alone(slots_of(NOISE).features))
    (loss, metrics), gradient = measure()(PARAMS, FROZEN, batch_of(PACKED), KEY)
    assert_same((loss, gradient), (expected.loss, expected.gradient))
    for name in ("feature_loss", "logit_loss"):
        np.testing.assert_allclose(metrics[name], getattr(expected, name)[0], rtol=1e-5)
    assert expected.accuracy > 0
    np.testing.assert_allclose(metrics["accuracy"], expected.accuracy, rtol=1e-6)
    assert sorted(metrics) == ["accuracy", "feature_loss", "logit_loss"]


@pytest.mark.parametrize("shift", [-2, -1, 1])
def test_slots_counted_elsewhere_would_be_caught(shift):
    """The released code counts the slots of answers themselves, two places later."""
    check_other_slots(measure(), PARAMS, shift)


def test_a_batch_in_which_no_slot_counts_gives_nothing():
    check_no_slot(measure(), PARAMS)


# ---- Packing and padding -------------------------------------------------------------------------


def test_packed_texts_weigh_as_many_slots_as_they_count():
    losses, gradients = zip(
        *(loss_and_gradient(batch_of((row, ())), CLEAN) for row in ALONE), strict=True
    )
    shares = np.bincount([text for text, _ in counted()]).astype(np.float32)
    shares /= shares.sum()
    gradient = jax.tree.map(
        lambda *leaves: sum(share * leaf for share, leaf in zip(shares, leaves, strict=True)),
        *gradients,
    )
    expected = (np.dot(shares, np.asarray(losses)), gradient)
    assert_same(loss_and_gradient(batch_of(PACKED), CLEAN), expected)


@pytest.mark.parametrize("settings", [SETTINGS, CLEAN], ids=["noise", "clean"])
def test_what_stands_in_padding_changes_nothing(settings):
    check_padding(measure(settings), PARAMS)


# ---- Noise ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [0.2, NOISE])
def test_noise_is_uniform_and_narrower_in_longer_texts(width):
    """`width` from end to end at 512 tokens, so half of it to each side."""
    noise = each_alone(slots_of(width).features) - clean_features()
    for example, own in zip(EXAMPLES, noise, strict=True):
        length = len(example.tokens)
        own = own[:length] / (width * 512 / length)
        assert np.abs(own).max() <= 0.5 + 1e-4
        # Of 128 numbers or more: the largest, their mean and their spread, as of a uniform law.
        assert min(own.max(), -own.min()) > 0.45
        assert abs(own.mean()) < 4 * 12**-0.5 / own.size**0.5
        np.testing.assert_allclose(own.std(), 12**-0.5, rtol=0.15)
        assert len(np.unique(own)) > 0.99 * own.size


def test_noise_of_no_width_is_none():
    slots = slots_of(0.0)
    np.testing.assert_allclose(each_alone(slots.features), clean_features(), atol=1e-5)
    np.testing.assert_array_equal(slots.features[:, 1:], slots.wanted[:, :-1])


def test_what_is_learned_is_clean():
    noisy, clean = slots_of(0.2), slots_of(0.0)
    assert np.abs(noisy.features - clean.features).max() > 1
    for name in ("embedded", "wanted", "counts"):
        np.testing.assert_array_equal(getattr(noisy, name), getattr(clean, name))


# ---- Recomputation and precision -----------------------------------------------------------------


@pytest.mark.parametrize("slots", [12, 6, 5, 1])
def test_recomputing_changes_nothing(slots, monkeypatch):
    """12 slots a row: one chunk, two, three of which the last is filled up, one for each slot."""
    monkeypatch.setattr(slot_values, "LOGIT_SLOTS", slots)
    check_recomputing(measure(), eagle_loss(HEAD, TARGET, SETTINGS, recompute=True), PARAMS)


@pytest.mark.parametrize("most, size", [(12, 12), (7, 6), (5, 4)])
def test_chunks_are_even_and_as_long_as_they_may_be(most, size, monkeypatch):
    monkeypatch.setattr(slot_values, "LOGIT_SLOTS", most)
    shapes = set()

    def values_of(logits, wanted_logits):
        shapes.update((logits.shape, wanted_logits.shape))
        return {"first": wanted_logits[..., 0]}

    slots = slots_of(NOISE)
    read = eagle.logit_reader(TARGET, FROZEN, slots, values_of, recompute=True)
    found = read(slots.features)["first"]
    assert shapes == {(2, size, VOCAB)}
    wanted = TARGET.logits(FROZEN, slots.wanted)[..., 0]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_bfloat16_target_trains_float32_params():
    check_bfloat16_target(measure(), PARAMS)
