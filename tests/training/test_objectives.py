"""Tests that every objective passes: its definition, masks, recomputation and precision."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.loading.methods import METHODS
from tests.models.test_eagle_head import gradients_differ_by
from tests.training.cases import (
    CASES,
    FROZEN,
    HASS,
    KEY,
    VOCAB,
    WITH_FEATURES,
    assert_same,
    batch_of,
    definition,
    measure_of,
)

every_method = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def test_every_training_of_the_registry_has_a_case():
    trainings = {row.training for row in METHODS.values()} - {None}
    assert {type(case.training) for case in CASES.values()} == trainings


@pytest.mark.parametrize(
    "case",
    [*CASES.values(), pytest.param(WITH_FEATURES, marks=pytest.mark.slow)],
    ids=[*CASES, "parallel-medusa with features"],
)
def test_loss_and_gradient_are_those_of_the_definition(case):
    """With packed and padded rows and noise; the definition takes one text at a time.

    The logits of all slots never exist: they come in blocks.
    """
    run = measure_of(case.training, case.head)
    program = str(run.trace(case.params, FROZEN, case.batch, KEY).jaxpr)
    assert f"f32[2,4,{VOCAB}]" in program
    assert f"[2,12,{VOCAB}]" not in program and f"[3,2,4,{VOCAB}]" not in program
    expected, expected_gradient, of_steps = definition(case)
    loss, gradient, metrics = case.measure()
    assert_same((loss, gradient), (expected, expected_gradient), tolerance=2e-5)
    assert metrics.keys() == {*case.weights[0], "accuracy"}
    for name in case.weights[0]:
        parts = [step[name] for step in of_steps]
        assert len(parts) == 1 or np.abs(np.diff(parts)).min() > 1e-3  # each step's is its own
        np.testing.assert_allclose(metrics[name], np.mean(parts), rtol=1e-5)
    accuracy = [step["accuracy"] for step in of_steps]
    has_own = "lm_heads_0" in case.params  # random, and so never right
    assert has_own or max(accuracy) > 0
    np.testing.assert_allclose(metrics["accuracy"], accuracy, rtol=1e-6)


@every_method
def test_the_content_of_padding_changes_nothing(case):
    padding = case.batch["segments"] == 0
    assert padding.sum() == 5
    filled = {
        "tokens": np.where(padding, 7, case.batch["tokens"]),
        "is_answer": case.batch["is_answer"] | padding,
        "positions": np.where(padding, 90, case.batch["positions"]),
    }
    assert_same(case.measure(case.batch | filled), case.measure(), tolerance=1e-6)


@every_method
def test_a_batch_in_which_no_slot_counts_gives_nothing(case):
    """One sequence is all padding; in the other, no slot predicts the tokens of answers."""
    batch = batch_of(((0,), ()))
    batch["is_answer"][:] = batch["positions"] < 2
    for leaf in jax.tree.leaves(case.measure(batch)):
        np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


@every_method
@pytest.mark.parametrize("shift", [-2, -1, 1])
def test_slots_counted_elsewhere_would_be_caught(case, shift):
    """EAGLE's released code counts the slots of answers themselves, two places later."""
    moved = {"is_answer": np.roll(case.batch["is_answer"], shift, axis=1)}
    loss, gradient, _ = case.measure()
    other_loss, other, _ = case.measure(case.batch | moved)
    assert abs(loss - other_loss) > 1e-3 * loss
    assert gradients_differ_by(other, gradient) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, "hass with token alignment"])
def test_neither_blocks_nor_recomputing_change_anything(name):
    case = CASES.get(name) or replace(CASES["hass"], training=replace(HASS, token_alignment=0.5))
    loss, gradient, metrics = case.measure()
    run = measure_of(case.training, case.head, recompute=True, block_slots=512)
    (whole, found), slope = run(case.params, FROZEN, case.batch, KEY)
    assert_same((loss, gradient), (whole, slope))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), found, metrics)


@pytest.mark.slow
@every_method
def test_a_bfloat16_target_trains_float32_params(case):
    """Loss, metrics and gradient are float32, and the gradient keeps its direction."""
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), FROZEN)
    loss, gradient, metrics = case.measure(frozen=narrow)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((loss, metrics, gradient)))
    wide, wide_gradient, _ = case.measure()
    np.testing.assert_allclose(loss, wide, rtol=0.05)
    for own, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(wide_gradient), strict=True):
        assert np.vdot(own, other) > 0.9 * np.linalg.norm(own) * np.linalg.norm(other)
