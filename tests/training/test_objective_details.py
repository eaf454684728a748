"""Details of single objectives: EAGLE's noise, EAGLE-3's draft vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training.losses import soft_cross_entropy
from specjax.training.objectives.eagle3 import Eagle3Training
from specjax.training.objectives.parallel_spec import ParallelMedusaTraining
from tests.decoding import heads
from tests.training.cases import (
    CASES,
    EXAMPLES,
    FROZEN,
    KEY,
    TABLE,
    TARGET,
    VOCAB,
    Case,
    by_drafts,
    clean_features,
    counted,
    each_alone,
    noisy_features,
)

DRAFTED = tuple(range(1, VOCAB, 3))


# ---- EAGLE --------------------------------------------------------------------------------------


def test_noise_is_uniform_and_narrower_in_longer_texts():
    """As wide as asked for at 512 tokens, half of it to each side."""
    width = 0.2
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


# ---- EAGLE-3 ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_targets_distribution_is_limited_to_the_draft_vocabulary():
    """Slots whose most likely token is outside of it teach nothing."""
    head, params = heads.eagle3_head(VOCAB, 1, DRAFTED)
    training = Eagle3Training(draft_vocab=len(DRAFTED), test_steps=1)
    case = Case(training, head, params, by_drafts, ({"logit_loss": 1.0},))
    loss, metrics = jax.jit(training.loss(head, TARGET))(params, FROZEN, case.batch, KEY)
    text, slot = np.transpose(counted())
    logits = np.asarray(by_drafts(case, params)(0, text, slot))
    target_logits = clean_features()[text, slot + 1] @ np.asarray(TABLE).T
    drafted, best = np.array(DRAFTED), target_logits.argmax(axis=-1)
    losses = soft_cross_entropy(jnp.asarray(logits), jnp.asarray(target_logits[:, drafted]))
    teaches = np.isin(best, drafted)
    assert 0 < teaches.sum() < len(teaches)
    np.testing.assert_allclose(loss, losses[teaches].sum() / len(teaches), rtol=2e-5)
    is_right = drafted[logits.argmax(axis=-1)] == best
    np.testing.assert_allclose(metrics["accuracy"], [is_right.mean()], rtol=1e-5)


# ---- ParallelSpec ---------------------------------------------------------------------


def test_the_target_runs_only_where_its_features_are_read():
    case = CASES["parallel-medusa"]
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, FROZEN)
    broken |= {name: FROZEN[name] for name in ("embed_tokens", "lm_head")}
    loss = jax.jit(ParallelMedusaTraining().loss(case.head, TARGET))
    found, metrics = loss(case.params, broken, case.batch, KEY)
    assert np.isfinite(found) and metrics["accuracy"].shape == (heads.MASKS + 1,)
