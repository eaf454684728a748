"""The optimizer's rate by step, what it clips, how it accumulates: against formulas in NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax.training.optimizer import OptimizerOptions, optimizer_of, schedule

STEPS, WARMUP, RATE = 1000, 100, 4e-3
SHAPES = {"bias": (3,), "weight": (2, 3)}


def numbers(seed: int, scale: float = 1.0) -> dict[str, jax.Array]:
    draw = np.random.default_rng(seed)
    return {
        name: jnp.asarray(scale * draw.normal(size=of), np.float32) for name, of in SHAPES.items()
    }


def options(**changed: Any) -> OptimizerOptions:
    """A constant rate, no weight decay and no clipping, but for what is changed."""
    plain = {"learning_rate": RATE, "warmup": 0.0, "decay": "none", "weight_decay": 0.0}
    return OptimizerOptions(**{**plain, "clip": "none", **changed})


def run(own: OptimizerOptions, gradients: list[Any], params: Any, num_steps: int = STEPS) -> list:
    """The params after each gradient."""
    optimizer = optimizer_of(own, num_steps)

    @jax.jit
    def step(params, moments, gradient):
        updates, moments = optimizer.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments

    moments, reached = optimizer.init(params), []
    for gradient in gradients:
        params, moments = step(params, moments, gradient)
        reached.append(params)
    return reached


def adamw(own: OptimizerOptions, gradients: list[Any], params: Any) -> list:
    """Loshchilov and Hutter's algorithm 2, at a constant rate, in double precision."""
    first, second, reached = {}, {}, []
    params = {name: np.asarray(value, np.float64) for name, value in params.items()}
    for count, gradient in enumerate(gradients, start=1):
        for name, value in params.items():
            slope = np.asarray(gradient[name], np.float64)
            first[name] = own.beta1 * first.get(name, 0) + (1 - own.beta1) * slope
            second[name] = own.beta2 * second.get(name, 0) + (1 - own.beta2) * slope**2
            mean, square = (
                moment[name] / (1 - beta**count)
                for moment, beta in ((first, own.beta1), (second, own.beta2))
            )
            change = mean / (np.sqrt(square) + 1e-8) + own.weight_decay * value
            params[name] = value - own.learning_rate * change
        reached.append(dict(params))
    return reached


def rates_of(own: OptimizerOptions, num_steps: int, steps: Any) -> np.ndarray:
    rate = schedule(own, num_steps)
    return np.array([np.asarray(rate(step)) for step in steps])


def assert_same(found: Any, expected: Any, tolerance: float = 1e-6) -> None:
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(own, other, rtol=tolerance, atol=1e-7)


# ---- The rate ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decay", "middle", "end"), [("linear", 0.5, 0.0), ("cosine", 0.5, 0.0), ("none", 1.0, 1.0)]
)
def test_the_rate_rises_and_falls(decay, middle, end):
    own = OptimizerOptions(learning_rate=RATE, warmup=0.1, decay=decay)
    shares = {
        0: 1 / (WARMUP + 1),  # no step is wasted
        WARMUP // 2: (WARMUP // 2 + 1) / (WARMUP + 1),
        WARMUP: 1.0,
        (WARMUP + STEPS) // 2: middle,
        STEPS: end,
    }
    found = rates_of(own, STEPS, shares) / RATE
    np.testing.assert_allclose(found, [*shares.values()], rtol=1e-5, atol=1e-6)
    rates = rates_of(own, STEPS, range(STEPS))
    assert rates.min() > 0
    assert rates.max() == rates[WARMUP]
    assert (np.diff(rates[: WARMUP + 1]) > 0).all()
    assert (np.diff(rates[WARMUP:]) <= 0).all()


@pytest.mark.parametrize(("decay", "quarter"), [("linear", 0.75), ("cosine", 0.5 + 0.5**1.5)])
def test_the_rate_falls_as_its_decay_says(decay, quarter):
    own = OptimizerOptions(learning_rate=RATE, warmup=0.0, decay=decay)
    found = rates_of(own, STEPS, [0, STEPS // 4])
    np.testing.assert_allclose(found, [RATE, quarter * RATE], rtol=1e-5)


@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("warmup", [0.0, 0.3, 0.99])
def test_the_shortest_runs_have_a_rate(num_steps, warmup):
    own = OptimizerOptions(learning_rate=RATE, warmup=warmup)
    rates = rates_of(own, num_steps, range(num_steps))
    assert ((rates > 0) & (rates <= RATE)).all()


def test_steps_take_the_rate_of_their_number():
    """Adam's step along a constant gradient is the rate."""
    own = options(decay="linear", warmup=0.5)
    reached = run(own, [{"weight": jnp.ones(1)}] * 6, {"weight": jnp.zeros(1)}, num_steps=6)
    values = np.array([0.0, *(params["weight"][0] for params in reached)])
    np.testing.assert_allclose(-np.diff(values), rates_of(own, 6, range(6)), rtol=1e-4)


# ---- Adam, weight decay and clipping -------------------------------------------------------------


def test_steps_are_those_of_adamw():
    own = options(weight_decay=0.2, beta1=0.8, beta2=0.95)
    gradients = [numbers(seed) for seed in range(4)]
    assert_same(run(own, gradients, numbers(9)), adamw(own, gradients, numbers(9)))


def test_weight_decay_is_decoupled():
    """It never enters the moments: it takes rate * decay * params, whatever the gradients are."""
    for scale in (1e-3, 1.0, 1e3):
        plain, decayed = (
            run(options(weight_decay=decay), [numbers(1, scale)], numbers(2))[0]
            for decay in (0.0, 0.5)
        )
        taken = jax.tree.map(jnp.subtract, plain, decayed)
        expected = jax.tree.map(lambda value: RATE * 0.5 * value, numbers(2))
        for own, other in zip(jax.tree.leaves(taken), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(own, other, atol=1e-6)


def by_value(gradient: Any) -> Any:
    return jax.tree.map(lambda leaf: np.clip(leaf, -0.5, 0.5), gradient)


def by_norm(gradient: Any) -> Any:
    norm = np.sqrt(sum(np.sum(leaf**2) for leaf in gradient.values()))
    return jax.tree.map(lambda leaf: leaf * min(1, 0.5 / norm), gradient)


@pytest.mark.parametrize("clip, bounded", [("value", by_value), ("norm", by_norm)])
def test_clipping_bounds_each_entry_or_all_together(clip, bounded):
    """One gradient lies within the bound, and stays as it is."""
    own = options(clip=clip, clip_at=0.5)
    gradients = [numbers(0, 0.1), numbers(1, 5.0), numbers(2)]
    assert_same(bounded(gradients[0]), gradients[0])
    found = run(own, gradients, numbers(9))
    assert_same(found, adamw(own, list(map(bounded, gradients)), numbers(9)))
    unbounded = adamw(own, gradients, numbers(9))[-1]["weight"]
    assert np.abs(found[-1]["weight"] - unbounded).max() > 1e-4


# ---- Accumulation --------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", ["value", "norm"])
def test_batches_are_averaged_before_a_step(clip):
    """Clipping, decay and rate are those of one step on the mean gradient."""
    together = options(clip=clip, clip_at=0.5, weight_decay=0.1, decay="linear", warmup=0.3)
    apart = options(**{**vars(together), "accumulate": 3})
    gradients = [numbers(seed) for seed in range(9)]
    means = [
        jax.tree.map(lambda *leaves: sum(leaves) / 3, *gradients[first : first + 3])
        for first in (0, 3, 6)
    ]
    reached = run(apart, gradients, numbers(9), num_steps=3)
    assert_same(reached[2::3], run(together, means, numbers(9), num_steps=3))
    for between in (0, 1, 3, 4, 6, 7):
        before = reached[between - between % 3 - 1] if between > 2 else numbers(9)
        assert_same(reached[between], before, tolerance=0)
