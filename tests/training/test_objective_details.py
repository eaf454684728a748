"""Details of single objectives: EAGLE's noise, EAGLE-3's draft vocabulary, Hydra's slots."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.drafter import Context, Params
from specjax.decoding.drafters.hydra import Hydra
from specjax.decoding.engine import Engine
from specjax.decoding.prompt import from_ids
from specjax.models.heads import HeadWeights
from specjax.training.losses import soft_cross_entropy
from specjax.training.objectives.eagle import EagleTraining
from specjax.training.objectives.eagle3 import Eagle3Training
from specjax.training.objectives.hydra import HydraTraining
from specjax.training.objectives.parallel_spec import ParallelMedusaTraining
from tests.decoding import heads
from tests.training.cases import (
    ALONE,
    CASES,
    DEPTHS,
    EXAMPLES,
    FROZEN,
    KEY,
    NOISE,
    TABLE,
    TARGET,
    VOCAB,
    Case,
    assert_same,
    batch_of,
    by_drafts,
    clean_features,
    counted,
    each_alone,
    measure_of,
    noisy_features,
)

CLEAN = EagleTraining(feature_weight=0.7, logit_weight=0.3, noise=0.0)
DRAFTED = tuple(range(1, VOCAB, 3))


# ---- EAGLE --------------------------------------------------------------------------------------


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


# ---- EAGLE-3 ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_targets_distribution_is_limited_to_the_draft_vocabulary():
    """Slots whose most likely token is outside of it teach nothing."""
    head, params = heads.eagle3_head(VOCAB, 1, DRAFTED)
    training = Eagle3Training(draft_vocab=len(DRAFTED), test_steps=1)
    case = Case(training, head, params, by_drafts, ({"logit_loss": 1.0},))
    loss, metrics = jax.jit(training.loss(head, TARGET))(params, FROZEN, case.batch, KEY)
    logits_at, (text, slot) = by_drafts(case, params), np.transpose(counted())
    logits = np.stack([logits_at(0, *place) for place in counted()])
    target_logits = clean_features()[text, slot + 1] @ np.asarray(TABLE).T
    drafted, best = np.array(DRAFTED), target_logits.argmax(axis=-1)
    losses = soft_cross_entropy(jnp.asarray(logits), jnp.asarray(target_logits[:, drafted]))
    teaches = np.isin(best, drafted)
    assert 0 < teaches.sum() < len(teaches)
    np.testing.assert_allclose(loss, losses[teaches].sum() / len(teaches), rtol=2e-5)
    is_right = drafted[logits.argmax(axis=-1)] == best
    np.testing.assert_allclose(metrics["accuracy"], [is_right.mean()], rtol=1e-5)


# ---- Hydra and ParallelSpec ---------------------------------------------------------------------


@pytest.mark.slow
def test_what_hydra_trains_is_what_drafts(monkeypatch):
    """Logits of every slot and depth in a packed row, and the drafter's behind that much text."""
    case = CASES["hydra with prefix"]
    module, given = case.head, Params(FROZEN, case.params)
    trained: list[Any] = []  # by depth, each text in its own sequence
    logit_values = HydraTraining.logit_values

    def record(self, logits, target_logits):
        trained.append(each_alone(logits))
        return logit_values(self, logits, target_logits)

    monkeypatch.setattr(HydraTraining, "logit_values", record)
    batch = jax.tree.map(jnp.asarray, batch_of())
    with jax.disable_jit():  # also of the loop over blocks, so that there are values to look at
        HydraTraining().loss(module, TARGET)(case.params, FROZEN, batch, KEY)
    engine = Engine(TARGET, Hydra(module), max_new_tokens=4)
    for text in (0, 2):  # one that has its row for itself, and one that follows another
        tokens = EXAMPLES[text].tokens.tolist()
        roots = range(1, len(tokens) - 1)  # each ends one prompt
        prompts = from_ids([tokens[: root + 1] for root in roots], bucket=16)
        state = engine.prefill(given, prompts, KEY)
        context = Context(state.tokens, state.length)
        drafter = Hydra(module)
        features, _ = drafter.catch_up(drafter.bind(TARGET, given), state.drafter, context)
        for row, root in enumerate(roots):
            for depth in range(1, min(DEPTHS, len(tokens) - 1 - root) + 1):
                behind = TARGET.embed(FROZEN, jnp.asarray([tokens[root : root + depth]]))
                weights = HeadWeights(case.params, TARGET, FROZEN)
                one = features[row : row + 1]
                logits = module.logits_at(weights, depth, one, behind[None])[0, 0]
                learned = trained[depth - 1][text, root - 1 + depth]  # where that feature stands
                assert np.abs(learned - logits).max() <= 1e-5 * np.abs(logits).max()


def test_the_target_runs_only_where_its_features_are_read():
    case = CASES["parallel-medusa"]
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, FROZEN)
    broken |= {name: FROZEN[name] for name in ("embed_tokens", "lm_head")}
    loss = jax.jit(ParallelMedusaTraining().loss(case.head, TARGET))
    found, metrics = loss(case.params, broken, case.batch, KEY)
    assert np.isfinite(found) and metrics["accuracy"].shape == (heads.MASKS + 1,)
