"""Every loss against its definition, token by token in double precision."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training.losses import (
    TOP_LOSSES,
    smooth_l1,
    soft_cross_entropy,
    top_loss,
)

VOCAB, K, P = 13, 4, 0.8
SOFT = "soft cross-entropy"  # tested along with the top losses
MINIMAL_AT_WANTED = (SOFT, "normed-top-k-linear", "normed-top-k-softmax", "bild")


def pairs(seed: int = 0, shape: tuple[int, ...] = (3, 5), vocab: int = VOCAB):
    """Logits and wanted logits, unlike but related, as a head's would be."""
    numbers = np.random.default_rng(seed)
    wanted = 2 * numbers.normal(size=(*shape, vocab))
    own = wanted + 1.5 * numbers.normal(size=(*shape, vocab))
    return jnp.asarray(own, jnp.float32), jnp.asarray(wanted, jnp.float32)


@partial(jax.jit, static_argnames=("kind", "k", "p"))
def loss_of(kind, logits, wanted, k=K, p=P):
    if kind == SOFT:
        return soft_cross_entropy(logits, wanted)
    return top_loss(kind, logits, wanted, k, p)


@partial(jax.jit, static_argnames=("kind", "k", "p"))
def gradient_of(kind, logits, wanted, k=K, p=P):
    def total(logits, wanted):
        return jnp.sum(loss_of(kind, logits, wanted, k, p))

    return jax.grad(total, argnums=(0, 1))(logits, wanted)


# ---- The definitions ----------------------------------------------------------------------------


def probabilities(logits) -> list[float]:
    return shares([np.exp(each - max(logits)) for each in logits])


def shares(values) -> list[float]:
    return [value / sum(values) for value in values]


def by_likelihood(logits) -> list[int]:
    return sorted(range(len(logits)), key=lambda token: -logits[token])


def cross_entropy(wanted, predicted) -> float:
    return -sum(w * np.log(q) for w, q in zip(wanted, predicted, strict=True))


def slow_over(tokens, own, wanted) -> float:
    p, q = probabilities(wanted), probabilities(own)
    return -sum(p[token] * np.log(q[token]) for token in tokens)


def slow_top_p(own, wanted, k, p):
    kept, reached = [], 0.0
    for token in by_likelihood(wanted):
        if reached >= p:
            break
        kept.append(token)
        reached += probabilities(wanted)[token]
    return slow_over(kept, own, wanted)


def slow_normed(norm, own, wanted, k):
    tokens = by_likelihood(wanted)[:k]
    both = [[probabilities(each)[token] for token in tokens] for each in (wanted, own)]
    return cross_entropy(*map(norm, both))


def slow_recall(own, wanted, k, p):
    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    found = []
    for token in by_likelihood(wanted)[:k]:
        rank = 1 + sum(sigmoid(own[v] - own[token]) for v in range(len(own)) if v != token)
        found.append(sigmoid(k - rank))
    return 1 - sum(found) / k


def slow_bild(own, wanted, k, p):
    total = 0.0
    for leader in (wanted, own):
        tokens = by_likelihood(leader)[:k]
        ordered = [(a, b) for place, a in enumerate(tokens) for b in tokens[place + 1 :]]
        wanted_pairs, own_pairs = (
            probabilities([(logits[a] - logits[b]) / 3 for a, b in ordered])
            for logits in (wanted, own)
        )
        for w, q in zip(wanted_pairs, own_pairs, strict=True):
            total += w * (np.log(w) - np.log(q))
    return total


SLOW = {
    SOFT: lambda own, wanted, k, p: slow_over(range(len(own)), own, wanted),
    "top-k": lambda own, wanted, k, p: slow_over(by_likelihood(wanted)[:k], own, wanted),
    "top-p": slow_top_p,
    "normed-top-k-linear": lambda own, wanted, k, p: slow_normed(shares, own, wanted, k),
    "normed-top-k-softmax": lambda own, wanted, k, p: slow_normed(probabilities, own, wanted, k),
    "bidirectional-top-k": lambda own, wanted, k, p: slow_over(
        {*by_likelihood(wanted)[:k], *by_likelihood(own)[:k]}, own, wanted
    ),
    "recall-at-k": slow_recall,
    "bild": slow_bild,
}
every_kind = pytest.mark.parametrize("kind", SLOW)


def slow(kind, own, wanted, k=K, p=P) -> np.ndarray:
    own, wanted = (np.asarray(each, np.float64) for each in (own, wanted))
    values = [SLOW[kind](own[at], wanted[at], k, p) for at in np.ndindex(own.shape[:-1])]
    return np.array(values).reshape(own.shape[:-1])


# ---- Values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, k, p", [(kind, K, P) for kind in SLOW] + [("top-p", 2, 0.3)])
def test_a_loss_is_its_definition_at_every_slot(kind, k, p):
    own, wanted = pairs()
    expected = slow(kind, own, wanted, k, p)
    assert expected.std() > 1e-2
    np.testing.assert_allclose(loss_of(kind, own, wanted, k=k, p=p), expected, rtol=1e-4, atol=1e-5)


def test_every_kind_is_tested_and_unlike_every_other():
    assert SLOW.keys() - {SOFT} == TOP_LOSSES.keys()
    found = {kind: np.asarray(loss_of(kind, *pairs())) for kind in SLOW}
    for first in found:
        for second in found:
            if first != second:
                assert np.abs(found[first] - found[second]).max() > 1e-2, (first, second)


def test_smooth_l1_is_quadratic_up_to_1_linear_beyond_and_a_mean():
    predicted = jnp.array([[0.0, 0.5, 1.0, -3.0], [2.0, 2.0, 2.0, 2.0]])
    wanted = jnp.array([[0.0, 0.0, 0.0, 0.0], [2.0, 2.0, 2.0, 3.0]])
    expected = [(0 + 0.125 + 0.5 + 2.5) / 4, 0.5 / 4]
    np.testing.assert_allclose(smooth_l1(predicted, wanted), expected, rtol=1e-6)


@pytest.mark.parametrize("kind", ["top-k", "bidirectional-top-k", "normed-top-k-linear", "top-p"])
def test_over_all_tokens_it_is_the_soft_cross_entropy(kind):
    own, wanted = pairs(seed=2)
    expected = soft_cross_entropy(own, wanted)
    np.testing.assert_allclose(loss_of(kind, own, wanted, k=VOCAB, p=1.0), expected, rtol=1e-5)


@every_kind
def test_more_tokens_than_there_are_means_all(kind):
    found, expected = (loss_of(kind, *pairs(seed=3), k=k) for k in (VOCAB + 5, VOCAB))
    np.testing.assert_array_equal(found, expected)


def test_top_p_keeps_at_least_the_most_likely_token():
    own, wanted = pairs(seed=4)
    found = loss_of("top-p", own, wanted, k=1, p=1e-6)
    np.testing.assert_allclose(found, loss_of("top-k", own, wanted, k=1), rtol=1e-6)


def test_recall_distinguishes_found_tokens_from_missed_ones():
    """Ranks of logits far apart are whole numbers, so the loss is known in closed form."""
    wanted = jnp.array([[50.0, 40.0, 30.0, 20.0, 10.0, 0.0]])
    share = 1 / (1 + np.exp(-np.array([2.0, 1.0, 0.0, -1.0, -2.0, -3.0])))  # k - rank, k = 3
    found = loss_of("recall-at-k", wanted, wanted, k=3)
    missed = loss_of("recall-at-k", wanted[:, ::-1], wanted, k=3)
    np.testing.assert_allclose(found, [1 - share[:3].mean()], atol=1e-4)
    np.testing.assert_allclose(missed, [1 - share[3:].mean()], atol=1e-4)


def test_what_comes_in_16_bits_is_computed_in_32():
    own, wanted = (each.astype(jnp.bfloat16) for each in pairs(seed=5))
    wide = [each.astype(jnp.float32) for each in (own, wanted)]
    for loss in (smooth_l1, *(partial(loss_of, kind) for kind in SLOW)):
        found = loss(own, wanted)
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, loss(*wide), rtol=1e-6)


# ---- Gradients ----------------------------------------------------------------------------------


@every_kind
def test_the_gradient_is_that_of_the_definition_and_spares_what_is_wanted(kind):
    own, wanted = pairs(seed=6, shape=(2,))
    found, of_wanted = gradient_of(kind, own, wanted)
    assert not np.asarray(of_wanted).any()
    step, exact = 1e-6, np.asarray(own, np.float64)
    expected = np.zeros_like(exact)
    for at in np.ndindex(*exact.shape):
        moved = np.zeros_like(exact)
        moved[at] = step
        up, down = (slow(kind, exact + sign * moved, wanted) for sign in (1, -1))
        expected[at] = (up - down).sum() / (2 * step)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_smooth_l1_spares_what_is_wanted():
    total = jax.grad(lambda own, wanted: jnp.sum(smooth_l1(own, wanted)), argnums=(0, 1))
    of_own, of_wanted = total(*pairs(seed=7))
    assert np.asarray(of_own).any() and not np.asarray(of_wanted).any()


@every_kind
def test_the_minimum_lies_where_both_say_the_same_if_both_are_normalised(kind):
    """The others pull the probability of all other tokens down as well."""
    _, wanted = pairs(seed=8)
    at_wanted = np.abs(gradient_of(kind, wanted, wanted)[0]).max()
    assert (at_wanted < 1e-6) == (kind in MINIMAL_AT_WANTED)
    least = np.asarray(loss_of(kind, wanted, wanted))
    for seed in range(5 if kind in MINIMAL_AT_WANTED else 0):
        other = wanted + jax.random.normal(jax.random.key(seed), wanted.shape)
        assert (np.asarray(loss_of(kind, other, wanted)) > least).all()


@every_kind
def test_extreme_logits_give_finite_values_and_gradients(kind):
    numbers = np.random.default_rng(9)
    own, wanted = (
        jnp.asarray(numbers.choice([-1e4, 0.0, 1e4], size=(40, VOCAB)), jnp.float32)
        for _ in range(2)
    )
    value = loss_of(kind, own, wanted)
    assert np.isfinite(value).all() and np.sum(value) > 0
    assert np.isfinite(gradient_of(kind, own, wanted)[0]).all()


# ---- Memory and requests ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TOP_LOSSES)
def test_the_gradient_needs_no_copy_of_the_vocabulary_per_token_of_the_set(kind):
    k, shape = 64, (8, 4096)
    logits = jax.ShapeDtypeStruct(shape, jnp.float32)
    analysis = gradient_of.lower(kind, logits, logits, k, P).compile().memory_analysis()
    assert analysis is not None
    one = 4 * np.prod(shape)
    pairs_of_set = 4 * shape[0] * k**2
    assert analysis.temp_size_in_bytes < 12 * one + 12 * pairs_of_set < k * one
