"""Every loss against its definition, token by token in double precision."""

from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training import losses
from specjax.training.losses import TOP_LOSSES, distribution_loss, smooth_l1
from specjax.training.objectives.hass import HassTraining
from tests.decoding.tiny import slow_except

VOCAB, K, P = 13, 4, 0.8
SHAPE = 3, 2, VOCAB  # of all logits, so that each loss is compiled once
SOFT = "soft cross-entropy"  # tested along with the top losses
LK = ("lk-lambda", "lk-alpha")


def pairs(seed: int = 0):
    """The logits of a head and of its target, different but related."""
    numbers = np.random.default_rng(seed)
    targets = 2 * numbers.normal(size=SHAPE)
    logits = targets + 1.5 * numbers.normal(size=SHAPE)
    return jnp.asarray(logits, jnp.float32), jnp.asarray(targets, jnp.float32)


@partial(jax.jit, static_argnames=("kind", "k", "p"))
def loss_of(kind, logits, targets, k=K, p=P):
    if kind == SOFT:
        return losses.soft_cross_entropy(logits, targets)
    if kind in LK:
        return distribution_loss(kind, logits, targets)
    return losses.top_loss(kind, logits, targets, k, p)


@partial(jax.jit, static_argnames=("kind", "k", "p"))
def gradient_of(kind, logits, targets, k=K, p=P):
    def total(logits, targets):
        return jnp.sum(loss_of(kind, logits, targets, k, p))

    return jax.grad(total, argnums=(0, 1))(logits, targets)


def shares(values) -> list[float]:
    return np.divide(values, np.sum(values)).tolist()


def probabilities(logits) -> list[float]:
    return shares(np.exp(np.subtract(logits, np.max(logits))))


def by_likelihood(logits) -> list[int]:
    return sorted(range(len(logits)), key=lambda token: -logits[token])


def cross_entropy(targets, predicted) -> float:
    return -sum(w * np.log(q) for w, q in zip(targets, predicted, strict=True))


def slow_over(tokens, logits, targets) -> float:
    p, q = probabilities(targets), probabilities(logits)
    return -sum(p[token] * np.log(q[token]) for token in tokens)


def slow_top_p(logits, targets, k, p):
    kept, reached = [], 0.0
    for token in by_likelihood(targets):
        if reached >= p:
            break
        kept.append(token)
        reached += probabilities(targets)[token]
    return slow_over(kept, logits, targets)


def slow_normed(norm, logits, targets, k, p):
    tokens = by_likelihood(targets)[:k]
    both = [[probabilities(values)[token] for token in tokens] for values in (targets, logits)]
    return cross_entropy(*map(norm, both))


def slow_recall(logits, targets, k, p):
    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    recalled = []
    for token in by_likelihood(targets)[:k]:
        rank = 1 + sum(sigmoid(logits[v] - logits[token]) for v in range(len(logits)) if v != token)
        recalled.append(sigmoid(k - rank))
    return 1 - sum(recalled) / k


def slow_bild(logits, targets, k, p):
    total = 0.0
    for leader in (targets, logits):
        tokens = by_likelihood(leader)[:k]
        ordered = [(a, b) for place, a in enumerate(tokens) for b in tokens[place + 1 :]]
        p_pairs, q_pairs = (
            probabilities([(values[a] - values[b]) / 3 for a, b in ordered])
            for values in (targets, logits)
        )
        total += sum(w * np.log(w / q) for w, q in zip(p_pairs, q_pairs, strict=True))
    return total


def overlap_of(logits, targets) -> float:
    return sum(map(min, probabilities(logits), probabilities(targets)))


def slow_blend(logits, targets, k=K, p=P, share=None):
    """LK's blend; `share` is that of the divergence where it is a constant."""
    overlap = overlap_of(logits, targets)
    share = np.exp(-3 * overlap) if share is None else share
    probs = probabilities(targets)
    divergence = cross_entropy(probs, probabilities(logits)) - cross_entropy(probs, probs)
    return share * divergence + (1 - share) * (1 - overlap)


SLOW = {
    "lk-lambda": slow_blend,
    "lk-alpha": lambda logits, targets, k, p: -np.log(overlap_of(logits, targets)),
    SOFT: lambda logits, targets, k, p: slow_over(range(len(logits)), logits, targets),
    "top-k": lambda logits, targets, k, p: slow_over(by_likelihood(targets)[:k], logits, targets),
    "top-p": slow_top_p,
    "normed-top-k-linear": partial(slow_normed, shares),
    "normed-top-k-softmax": partial(slow_normed, probabilities),
    "bidirectional-top-k": lambda logits, targets, k, p: slow_over(
        {*by_likelihood(targets)[:k], *by_likelihood(logits)[:k]}, logits, targets
    ),
    "recall-at-k": slow_recall,
    "bild": slow_bild,
}
every_kind = pytest.mark.parametrize("kind", SLOW)


def slow(kind, logits, targets, k=K, p=P) -> np.ndarray:
    logits, targets = (np.asarray(each, np.float64) for each in (logits, targets))
    values = [SLOW[kind](logits[at], targets[at], k, p) for at in np.ndindex(logits.shape[:-1])]
    return np.array(values).reshape(logits.shape[:-1])


@pytest.mark.parametrize("kind, k, p", [(kind, K, P) for kind in SLOW] + [("top-p", 2, 0.3)])
def test_a_loss_is_its_definition_at_every_slot(kind, k, p):
    logits, targets = pairs()
    expected = slow(kind, logits, targets, k, p)
    assert expected.std() > 1e-2
    np.testing.assert_allclose(
        loss_of(kind, logits, targets, k=k, p=p), expected, rtol=1e-4, atol=1e-5
    )


def test_every_kind_is_tested_and_can_be_set():
    assert SLOW.keys() - {SOFT, *LK} == TOP_LOSSES.keys() == {*get_args(losses.TopLoss)}
    assert {*get_args(losses.DistributionLoss)} == {"cross-entropy", *LK}
    values = HassTraining(top_loss="top-p", top_p=P).top_values(*pairs())
    np.testing.assert_allclose(values["top_loss"], loss_of("top-p", *pairs()), rtol=1e-5)


def test_smooth_l1_is_quadratic_up_to_1_linear_beyond_and_a_mean():
    predicted = jnp.array([[0.0, 0.5, 1.0, -3.0], [2.0, 2.0, 2.0, 2.0]])
    targets = jnp.array([[0.0, 0.0, 0.0, 0.0], [2.0, 2.0, 2.0, 3.0]])
    expected = [(0 + 0.125 + 0.5 + 2.5) / 4, 0.5 / 4]
    np.testing.assert_allclose(smooth_l1(predicted, targets), expected, rtol=1e-6)
    gradients = jax.grad(lambda *both: jnp.sum(smooth_l1(*both)), argnums=(0, 1))(*pairs(seed=7))
    assert np.asarray(gradients[0]).any() and not np.asarray(gradients[1]).any()


def test_what_comes_in_16_bits_is_computed_in_32():
    logits, targets = (each.astype(jnp.bfloat16) for each in pairs(seed=5))
    wide = [each.astype(jnp.float32) for each in (logits, targets)]
    # The top losses share a cast.
    for loss in (smooth_l1, *(partial(loss_of, kind) for kind in (SOFT, *LK, "top-k"))):
        found = loss(logits, targets)
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, loss(*wide), rtol=1e-6)


@every_kind
def test_the_gradient_is_that_of_the_definition_and_spares_the_target(kind):
    logits, targets = pairs(seed=6)
    found, of_targets = gradient_of(kind, logits, targets)
    assert not np.asarray(of_targets).any()
    exact, wanted = (np.asarray(each, np.float64) for each in (logits, targets))
    expected = np.zeros(SHAPE)
    for slot in np.ndindex(SHAPE[:-1]):
        at, measure = exact[slot], SLOW[kind]
        if kind == "lk-lambda":  # gradients take the blend as it is at these logits
            measure = partial(slow_blend, share=np.exp(-3 * overlap_of(at, wanted[slot])))
        for token, step in enumerate(1e-6 * np.eye(VOCAB)):
            up, down = (measure(at + sign * step, wanted[slot], K, P) for sign in (1, -1))
            expected[slot][token] = (up - down) / 2e-6
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(found, expected, atol=1e-5)


@every_kind
def test_extreme_logits_give_finite_values_and_gradients(kind):
    numbers = np.random.default_rng(9)
    for pair in numbers.choice([-1e4, 0.0, 1e4], size=(7, 2, *SHAPE)):
        logits, targets = jnp.asarray(pair, jnp.float32)
        value = loss_of(kind, logits, targets)
        assert np.isfinite(value).all() and np.sum(value) > 0
        assert np.isfinite(gradient_of(kind, logits, targets)[0]).all()


@pytest.mark.parametrize("kind", LK)
def test_an_lk_loss_is_finite_without_overlap(kind):
    apart = jnp.array([[0.0, -1e4]]), jnp.array([[-1e4, 0.0]])
    assert loss_of(kind, *apart) > 10
    pull = gradient_of(kind, *apart)[0]
    if kind == "lk-lambda":  # the divergence pulls where the overlap does not
        np.testing.assert_allclose(pull, [[1.0, -1.0]], atol=1e-6)
    else:
        assert not np.asarray(pull).any()


@pytest.mark.parametrize("kind", LK)
def test_an_lk_loss_over_a_draft_vocabulary_overlaps_with_the_whole_distribution(kind):
    logits, targets = pairs()
    drafted = np.array([1, 4, 5, 11])
    found = distribution_loss(kind, logits[..., :4], targets, jnp.asarray(drafted))
    p, q = jax.nn.softmax(targets)[..., drafted], jax.nn.softmax(logits[..., :4])
    overlap = np.minimum(p, q).sum(axis=-1)
    expected = -np.log(overlap)
    if kind == "lk-lambda":
        within = p / p.sum(axis=-1, keepdims=True)
        share, divergence = np.exp(-3 * overlap), (within * np.log(within / q)).sum(axis=-1)
        expected = share * divergence + (1 - share) * (1 - overlap)
    assert p.sum(axis=-1).max() < 0.9
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize("kind", slow_except(TOP_LOSSES, "bild", "recall-at-k"))
def test_the_gradient_needs_no_copy_of_the_vocabulary_per_token_of_the_set(kind):
    k, shape = 64, (8, 4096)
    logits = jax.ShapeDtypeStruct(shape, jnp.float32)
    analysis = gradient_of.lower(kind, logits, logits, k, P).compile().memory_analysis()
    assert analysis is not None
    one = 4 * np.prod(shape)
    pairs_of_set = 4 * shape[0] * k**2
    assert analysis.temp_size_in_bytes < 12 * one + 12 * pairs_of_set < k * one
