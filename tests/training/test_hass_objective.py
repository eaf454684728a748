"""HASS's loss and gradient against drafting itself; what flows between steps."""

from dataclasses import replace
from functools import cache, partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from specjax.core.errors import SpecjaxError
from specjax.models.cache import KVCache
from specjax.models.target import causal_rows
from specjax.training.losses import TOP_LOSSES, top_loss
from specjax.training.objectives import hass
from specjax.training.objectives import slots as slot_values
from specjax.training.objectives.eagle import Slots, eagle_loss
from specjax.training.objectives.hass import hass_loss, next_stream
from specjax.training.objectives.options import EagleObjective, HassObjective, TopLoss
from tests.models import test_eagle_head as simulation
from tests.training.literal import (
    FROZEN,
    HEAD,
    KEY,
    NOISE,
    PACKED,
    PARAMS,
    TARGET,
    assert_same,
    batch_of,
    counted,
    definition,
    each_alone,
    slots_of,
)
from tests.training.objective_checks import check_bfloat16_target, check_recomputing, measure_of

# Nothing is a default, so that a setting that is not read shows.
SETTINGS = HassObjective(
    feature_weight=0.7,
    logit_weight=0.3,
    noise=NOISE,
    align_steps=3,
    step_decay=0.6,
    top_weight=0.8,
    top_k=4,
)
BATCH = batch_of(PACKED)


@cache
def measure(settings: HassObjective):
    return measure_of(hass_loss(HEAD, TARGET, settings))


@cache
def measured(settings: HassObjective):
    """Loss, gradient and metrics of the packed texts."""
    (loss, metrics), gradient = measure(settings)(PARAMS, FROZEN, BATCH, KEY)
    return loss, gradient, metrics


def expected(settings: HassObjective, **other: Any):
    return definition(settings, each_alone(slots_of(NOISE).features), **other)


def test_the_defaults_are_the_published_ones():
    assert HassObjective() == HassObjective(
        feature_weight=1.0,
        logit_weight=0.1,
        noise=0.2,
        align_steps=3,
        step_decay=1.0,
        top_loss="top-k",
        top_weight=1.0,
        top_k=10,
        token_alignment=0.0,
    )


# ---- The definition ------------------------------------------------------------------------------


def test_loss_and_gradient_are_those_of_drafting():
    """Each text alone, each slot as the first, second and third token of a draft."""
    loss, gradient, metrics = measured(SETTINGS)
    wanted = expected(SETTINGS)
    assert_same((loss, gradient), (wanted.loss, wanted.gradient))
    for name in ("feature_loss", "logit_loss", "top_loss"):
        parts = getattr(wanted, name)
        assert np.abs(np.diff(parts)).min() > 1e-3  # each step's is its own
        np.testing.assert_allclose(metrics[name], np.mean(parts), rtol=1e-5)


def test_accuracy_is_told_step_by_step():
    metrics, wanted = measured(SETTINGS)[2], expected(SETTINGS)
    assert metrics["accuracy"].shape == (3,)
    assert len({0.0, *wanted.accuracy.tolist()}) == 4
    np.testing.assert_allclose(metrics["accuracy"], wanted.accuracy, rtol=1e-6)


def test_a_gradient_between_steps_would_be_caught():
    attached = partial(simulation.steps, detach=False)
    wanted = expected(SETTINGS, predict=attached)
    loss, gradient, _ = measured(SETTINGS)
    np.testing.assert_allclose(loss, wanted.loss, rtol=1e-5)
    assert simulation.gradients_differ_by(gradient, wanted.gradient) > 1e-2


def test_one_step_without_top_loss_is_eagle():
    one = replace(SETTINGS, align_steps=1, top_weight=0.0)
    weights: Any = {"feature_weight": one.feature_weight, "logit_weight": one.logit_weight}
    settings = EagleObjective(noise=one.noise, **weights)
    loss_of_eagle = eagle_loss(HEAD, TARGET, settings)
    (loss, metrics), gradient = measure_of(loss_of_eagle)(PARAMS, FROZEN, BATCH, KEY)
    found = measured(one)
    jax.tree.map(np.testing.assert_array_equal, found, (loss, gradient, metrics))


def test_recomputing_changes_nothing(monkeypatch):
    """Nor does it when 12 slots are no multiple of a chunk."""
    settings = replace(SETTINGS, token_alignment=0.5)
    for slots in (slot_values.LOGIT_SLOTS, 5):
        monkeypatch.setattr(slot_values, "LOGIT_SLOTS", slots)
        loss = hass_loss(HEAD, TARGET, settings, recompute=True)
        check_recomputing(measure(settings), loss, PARAMS)


def test_a_bfloat16_target_trains_float32_params():
    check_bfloat16_target(measure(SETTINGS), PARAMS)


# ---- From step to step ---------------------------------------------------------------------------


def test_features_move_one_slot_on_and_no_text_takes_another_ones():
    features = jnp.arange(12.0).reshape(1, 6, 2)
    predicted = 100 + features
    segments = jnp.array([[1, 1, 1, 2, 2, 0]])
    first = np.asarray(next_stream(features, predicted, segments))[0, :, 0]
    np.testing.assert_array_equal(first, [0, 100, 102, 6, 106, 10])


def own_draft_from(head, params, target_params, text, first_drafted):
    """As `simulation.draft_from`, but each token drafted is the head's own, not the text's."""
    batch, length = text.tokens.shape

    def feed(carry, slot):
        cache, drafted = carry
        is_true = slot < first_drafted
        true = lax.dynamic_index_in_dim(text.features, slot, axis=1, keepdims=False)
        token = lax.dynamic_slice_in_dim(text.tokens, slot, 1, axis=1)
        own = jnp.argmax(TARGET.logits(target_params, drafted), axis=-1)[:, None]
        feature = jnp.where(is_true, true, lax.stop_gradient(drafted))
        rows = causal_rows(jnp.where(is_true, token, own), jnp.full((batch,), slot))
        predicted, cache = head.run(params, target_params, rows, feature[:, None], cache)
        return (cache.advance(jnp.ones(batch, jnp.int32)), predicted[:, 0]), predicted[:, 0]

    empty = KVCache.create(head.config.layers, batch, length)
    return lax.scan(feed, (empty, jnp.zeros_like(text.features[:, 0])), jnp.arange(length))[1]


def test_token_alignment_of_every_slot_is_drafting_from_own_tokens(monkeypatch):
    monkeypatch.setattr(simulation, "draft_from", own_draft_from)
    settings = replace(SETTINGS, token_alignment=1.0)
    wanted = expected(settings)
    found = measured(settings)
    assert_same(found, (wanted.loss, wanted.gradient))
    np.testing.assert_allclose(found[2]["accuracy"], wanted.accuracy, rtol=1e-6)
    assert abs(wanted.loss - measured(SETTINGS)[0]) > 1e-1  # other tokens than the text's


def test_token_alignment_of_no_slot_changes_nothing():
    """A probability that is never drawn, so that the code for tokens runs."""
    assert_same(measured(replace(SETTINGS, token_alignment=1e-30)), measured(SETTINGS), 1e-6)


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_token_alignment_takes_the_token_drafted_one_slot_before(probability):
    settings = replace(SETTINGS, token_alignment=probability)
    drafted = jnp.arange(2 * 4000.0).reshape(2, 4000, 1)
    text = -1 - drafted
    segments = jnp.asarray(np.repeat(np.arange(8), 500)[None].repeat(2, axis=0))
    slots = Slots(text, text, segments, segments, text, segments >= 0)
    found = np.asarray(hass._with_drafted(slots, drafted, KEY, settings))
    is_drafted = found >= 0
    np.testing.assert_array_equal(found, np.where(is_drafted, drafted - 1, text))
    assert not is_drafted[:, ::500].any()  # the first slot of a text has nothing before it
    assert abs(is_drafted.mean() - probability * 499 / 500) < 0.02


# ---- The top losses -----------------------------------------------------------------------------


def test_every_top_loss_can_be_set():
    assert set(get_args(TopLoss)) == set(TOP_LOSSES)


def test_a_top_loss_that_cannot_be_is_refused_before_training():
    settings = HassObjective(top_loss="bild", top_k=1)
    with pytest.raises(SpecjaxError, match="bild compares tokens in pairs, k = 1 has none"):
        hass_loss(HEAD, TARGET, settings)


@cache
def first_logits() -> tuple[Any, Any]:
    """What the LM head says to predicted and wanted features at the slots that count."""
    slots = slots_of(NOISE)
    predicted, _ = HEAD.step(
        PARAMS, slots.embedded, slots.features, (), slots.positions, slots.segments
    )
    both = [each_alone(TARGET.logits(FROZEN, each)) for each in (predicted, slots.wanted)]
    own, wanted = (each[*np.array(counted()).T] for each in both)
    return jnp.asarray(own), jnp.asarray(wanted)


@pytest.mark.parametrize("kind", ["bild", "recall-at-k", "top-p"])  # test_losses.py has them all
def test_a_top_loss_trains(kind):
    settings = replace(
        SETTINGS,
        feature_weight=0.0,
        logit_weight=0.0,
        align_steps=1,
        top_loss=kind,
        top_k=5,
        top_p=0.7,
    )
    loss, gradient, metrics = measured(settings)
    wanted = np.mean(top_loss(kind, *first_logits(), k=5, p=0.7))
    np.testing.assert_allclose(metrics["top_loss"], wanted, rtol=1e-5)
    np.testing.assert_allclose(loss, 0.8 * wanted, rtol=1e-5)
    leaves = jax.tree.leaves(gradient)
    assert all(np.isfinite(leaf).all() and np.any(leaf != 0) for leaf in leaves)
