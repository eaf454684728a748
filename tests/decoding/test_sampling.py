"""The filters against a plain reading, and the laws of the noise."""

from functools import partial
from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from specjax.decoding.sampling import ACCEPT, BONUS, DRAFT, Draw, Sampling, sequence_keys

VOCAB = 11
DRAWS = 6000
ROWS = [
    *np.random.default_rng(0).normal(0, 2, (12, VOCAB)),
    [3, 3, 3, 1, 1, 1, 1, 0, 0, 0, -2],  # ties, also at the cut
    [0] * VOCAB,
    [50, -50, -50, -50, -50, -50, -50, -50, -50, -50, -50],
]
LOGITS = np.asarray(ROWS, np.float32)


def slow_filtered(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Temperature, then top-k, then top-p of what is left; tokens as likely as the last stay."""
    scores = logits.astype(np.float64) / sampling.temperature
    if sampling.top_k is not None:
        least = np.sort(scores)[::-1][: sampling.top_k][-1]
        scores = np.where(scores >= least, scores, -np.inf)
    probs = np.exp(scores - scores.max())
    probs /= probs.sum()
    if sampling.top_p < 1:
        total = 0.0
        for prob in np.sort(probs)[::-1]:
            if total < sampling.top_p - 1e-9:
                least, total = prob, total + prob
        probs = np.where(probs >= least, probs, 0)
        probs /= probs.sum()
    with np.errstate(divide="ignore"):
        return np.log(probs)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.3, None, 0.9), (2.5, 1, 1.0), (2.5, 4, 0.5), (0.3, 1000, 1e-6), (2.5, 4, 1.0)],
)
def test_filters_are_temperature_then_top_k_then_top_p(temperature, top_k, top_p):
    sampling = Sampling(temperature, top_k, top_p)
    found = sampling.filtered(jnp.asarray(LOGITS))
    expected = np.stack([slow_filtered(row, sampling) for row in LOGITS])
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


def test_logits_of_16_bits_are_filtered_in_32():
    halves, sampling = jnp.asarray(LOGITS).astype(jnp.bfloat16), Sampling(0.3, 4, 0.9)
    np.testing.assert_array_equal(
        sampling.filtered(halves), sampling.filtered(halves.astype(jnp.float32))
    )


def draw(sampling: Sampling, rows: int = 1, start: int = 7) -> Draw:
    return Draw(sequence_keys(jax.random.key(0), rows), jnp.full((rows,), start), sampling)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_greedy_is_the_most_likely_token_whatever_the_filters(dtype):
    logits = jnp.asarray(LOGITS)[None].astype(dtype)
    positions = jnp.arange(len(LOGITS))[None]
    found = draw(Sampling(0.0, top_k=2, top_p=0.1)).perturbed(logits, positions)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, logits.astype(jnp.float32))
    assert Sampling(0.0).is_greedy
    assert not Sampling(1e-3).is_greedy


def p_value(counts: np.ndarray, probs: np.ndarray) -> float:
    assert counts[probs == 0].sum() == 0, "a token outside the filters was drawn"
    likely = probs > 0
    return chisquare(counts[likely], probs[likely] * counts.sum() / probs.sum()).pvalue


def scores_at_many_positions(sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Perturbed scores of one law at many positions, and that law."""
    logits = jnp.asarray([1.5, 0.0, 0.7, -1.0, 0.2])
    many = jnp.broadcast_to(logits, (1, DRAWS, 5))
    scores = draw(sampling).perturbed(many, jnp.arange(DRAWS)[None])
    return np.asarray(scores[0]), np.exp(np.asarray(sampling.filtered(logits), np.float64))


@pytest.mark.parametrize(
    ("filters", "verification"),
    [({"top_k": 3}, "coupled"), ({"top_p": 0.8}, "rejection"), ({}, "coupled")],
)
def test_the_best_score_is_a_draw_from_the_filtered_law(filters, verification):
    sampling = Sampling(0.8, **filters, verification=verification)
    scores, law = scores_at_many_positions(sampling)
    counts = np.bincount(scores.argmax(axis=1), minlength=5)
    assert p_value(counts, law) > 1e-3
    assert p_value(counts, np.where(law > 0, law**1.3, 0)) < 1e-6, "another law passes too"


def test_the_two_best_scores_are_draws_without_replacement_in_order():
    scores, law = scores_at_many_positions(Sampling(0.8))
    first, second = np.argsort(-scores, axis=1)[:, :2].T
    pairs = list(permutations(range(5), 2))
    counts = np.array([np.sum((first == a) & (second == b)) for a, b in pairs])
    assert p_value(counts, np.array([law[a] * law[b] / (1 - law[a]) for a, b in pairs])) > 1e-3
    assert p_value(counts, np.array([law[a] * law[b] for a, b in pairs])) < 1e-6


COUPLED, REJECTION = Sampling(1.0), Sampling(1.0, verification="rejection")
TYPICAL = Sampling(1.0, verification="typical")
SETTINGS = pytest.mark.parametrize("sampling", [COUPLED, REJECTION], ids=["coupled", "rejection"])


@partial(jax.jit, static_argnums=0)
def noise_of_two(sampling: Sampling, positions) -> jax.Array:
    return draw(sampling, rows=2).noise(positions, VOCAB)


@SETTINGS
def test_noise_of_a_position_does_not_depend_on_the_others(sampling):
    positions = np.array([[5, 9, 4, 30], [9, 2, 9, 5]])
    noise, seen = np.asarray(noise_of_two(sampling, positions)), {}
    for row, at in np.ndindex(2, 4):
        alone = noise_of_two(sampling, np.full((2, 1), positions[row, at]))
        np.testing.assert_array_equal(noise[row, at], alone[row, 0])
        seen[row, positions[row, at]] = tuple(noise[row, at])
    assert len(set(seen.values())) == len(seen) == 7, "rows and positions differ"


def test_only_the_noise_of_rejection_depends_on_round_and_stream():
    positions = jnp.array([[8, 9]])
    for sampling in (COUPLED, REJECTION, TYPICAL):
        one = draw(sampling).noise(positions, VOCAB, DRAFT)
        for start, stream in ((8, DRAFT), (7, BONUS)):
            other = draw(sampling, start=start).noise(positions, VOCAB, stream)
            assert (one != other).all() if sampling is REJECTION else (one == other).all()


@pytest.mark.parametrize(
    ("verification", "reproducible", "lossy"),
    [("coupled", True, False), ("rejection", False, False), ("typical", False, True)],
)
def test_what_a_verification_promises(verification, reproducible, lossy):
    drawn = Sampling(0.5, verification=verification)
    assert (drawn.is_reproducible, drawn.is_lossy) == (reproducible, lossy)
    greedy = Sampling(0.0, verification=verification)
    assert (greedy.is_reproducible, greedy.is_lossy) == (True, False)


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "unsafe_rbg"])
@SETTINGS
def test_row_b_of_a_batch_draws_as_it_would_alone(sampling, kind):
    key, positions = jax.random.key(5, impl=kind), jnp.arange(4)[None]
    together = Draw(sequence_keys(key, 3), jnp.full((3,), 7), sampling)
    noise = together.noise(jnp.tile(positions, (3, 1)), VOCAB)
    for row in range(3):
        own = jax.random.fold_in(key, row)
        alone = Draw(sequence_keys(own, 1), jnp.array([7]), sampling)
        np.testing.assert_array_equal(noise[row], alone.noise(positions, VOCAB)[0])


def test_uniform_numbers_are_uniform_and_differ_by_stream():
    positions = jnp.arange(300)[None]
    one = np.asarray(draw(REJECTION).uniform(positions, 5, ACCEPT))
    assert one.shape == (1, 300, 5)
    assert 0 <= one.min() < one.max() < 1
    assert p_value(np.histogram(one, bins=10, range=(0, 1))[0], np.full(10, 0.1)) > 1e-3
    assert (one != draw(REJECTION).uniform(positions, 5, BONUS)).all()


@pytest.mark.parametrize("settings", [{"temperature": 1e-40}, {"top_p": 1e-9}, {"top_k": 1}])
def test_settings_at_the_edge_of_their_range_leave_the_most_likely_token(settings):
    logits = jnp.asarray(LOGITS[:12])[None]
    sampling = Sampling(**{"temperature": 1.0} | settings)
    scores = draw(sampling).perturbed(logits, jnp.arange(12)[None])
    assert not jnp.isnan(scores).any()
    np.testing.assert_array_equal(jnp.argmax(scores, -1), jnp.argmax(logits, -1))
