"""HASS: the flow between steps, and token alignment."""

from dataclasses import replace
from functools import cache, partial

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training.objectives.eagle import EagleTraining
from tests.models import test_eagle_head as simulation
from tests.training.cases import (
    CASES,
    FROZEN,
    HASS,
    KEY,
    TARGET,
    assert_same,
    by_drafting,
    definition,
)

CASE = CASES["hass"]


@cache
def measured(training: EagleTraining = HASS):
    """Loss, gradient and metrics of the packed texts."""
    return replace(CASE, training=training).measure()


def test_a_gradient_between_steps_would_be_caught():
    attached = partial(simulation.steps, detach=False)
    expected, expected_gradient, _ = definition(CASE, partial(by_drafting, drafts=attached))
    loss, gradient, _ = measured()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert simulation.gradients_differ_by(gradient, expected_gradient) > 1e-2


# ---- From step to step ---------------------------------------------------------------------------


def test_token_alignment_of_every_slot_is_drafting_from_own_tokens(monkeypatch):
    def own_token(feature):
        return jnp.argmax(TARGET.logits(FROZEN, feature), axis=-1)

    own_draft = partial(simulation.draft_from, own_token=own_token)
    monkeypatch.setattr(simulation, "draft_from", own_draft)
    aligned = replace(HASS, token_alignment=1.0)
    expected, expected_gradient, of_steps = definition(replace(CASE, training=aligned))
    loss, gradient, metrics = measured(aligned)
    assert_same((loss, gradient), (expected, expected_gradient))
    accuracy = [step["accuracy"] for step in of_steps]
    np.testing.assert_allclose(metrics["accuracy"], accuracy, rtol=1e-6)
    assert abs(expected - measured()[0]) > 1e-1  # other tokens than the text's


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_token_alignment_takes_the_token_drafted_one_slot_before(probability):
    drafted = jnp.arange(2 * 4000.0).reshape(2, 4000, 1)
    text = -1 - drafted
    segments = jnp.asarray(np.repeat(np.arange(8), 500)[None].repeat(2, axis=0))
    training = replace(HASS, token_alignment=probability)
    aligned = np.asarray(training.align_tokens(text, drafted, segments, KEY))
    is_drafted = aligned >= 0
    np.testing.assert_array_equal(aligned, np.where(is_drafted, drafted - 1, text))
    assert not is_drafted[:, ::500].any()  # the first slot of a text has nothing before it
    assert abs(is_drafted.mean() - probability * 499 / 500) < 0.02
