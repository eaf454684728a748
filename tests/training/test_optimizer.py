"""The optimizer's rate by step, what it clips, how it accumulates: against formulas in NumPy."""

from dataclasses import replace
from functools import partial
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


def run(
    settings: OptimizerOptions, gradients: list[Any], params: Any, num_steps: int = STEPS
) -> list:
    """The params after each gradient."""
    optimizer = optimizer_of(settings, num_steps)

    @jax.jit
    def step(params, moments, gradient):
        updates, moments = optimizer.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments

    moments, reached = optimizer.init(params), []
    for gradient in gradients:
        params, moments = step(params, moments, gradient)
        reached.append(params)
    return reached


def adamw(settings: OptimizerOptions, gradients: list[Any], params: Any) -> list:
    """Loshchilov and Hutter's algorithm 2, in double precision."""
    rates = rates_of(settings, len(gradients), range(len(gradients)))
    first, second, reached = {}, {}, []
    params = {name: np.asarray(value, np.float64) for name, value in params.items()}
    for count, gradient in enumerate(gradients, start=1):
        for name, value in params.items():
            slope = np.asarray(gradient[name], np.float64)
            first[name] = settings.beta1 * first.get(name, 0) + (1 - settings.beta1) * slope
            second[name] = settings.beta2 * second.get(name, 0) + (1 - settings.beta2) * slope**2
            mean, square = (
                moment[name] / (1 - beta**count)
                for moment, beta in ((first, settings.beta1), (second, settings.beta2))
            )
            change = mean / (np.sqrt(square) + 1e-8) + settings.weight_decay * value
            params[name] = value - rates[count - 1] * change
        reached.append(dict(params))
    return reached


def rates_of(settings: OptimizerOptions, num_steps: int, steps: Any) -> np.ndarray:
    return np.asarray(jax.vmap(schedule(settings, num_steps))(jnp.asarray([*steps])))


def assert_same(found: Any, expected: Any, tolerance: float = 1e-6, atol: float = 1e-7) -> None:
    jax.tree.map(partial(np.testing.assert_allclose, rtol=tolerance, atol=atol), found, expected)


@pytest.mark.parametrize(
    ("decay", "quarter", "middle", "end"),
    [("linear", 0.75, 0.5, 0), ("cosine", 0.5 + 0.125**0.5, 0.5, 0), ("none", 1, 1, 1)],
)
def test_the_rate_rises_and_falls(decay, quarter, middle, end):
    settings = OptimizerOptions(learning_rate=RATE, warmup=0.1, decay=decay)
    shares = {
        0: 1 / (WARMUP + 1),  # no step is wasted
        WARMUP // 2: (WARMUP // 2 + 1) / (WARMUP + 1),
        WARMUP: 1.0,
        WARMUP + (STEPS - WARMUP) // 4: quarter,
        (WARMUP + STEPS) // 2: middle,
        STEPS: end,
    }
    found = rates_of(settings, STEPS, shares) / RATE
    np.testing.assert_allclose(found, [*shares.values()], rtol=1e-5, atol=1e-6)
    rates = rates_of(settings, STEPS, range(STEPS))
    assert rates.min() > 0
    assert (np.diff(rates[: WARMUP + 1]) > 0).all()
    assert (np.diff(rates[WARMUP:]) <= 0).all()


def by_value(gradient: Any) -> Any:
    return jax.tree.map(lambda leaf: np.clip(leaf, -0.5, 0.5), gradient)


def by_norm(gradient: Any) -> Any:
    norm = np.sqrt(sum(np.sum(leaf**2) for leaf in gradient.values()))
    return jax.tree.map(lambda leaf: leaf * min(1, 0.5 / norm), gradient)


@pytest.mark.parametrize("clip, bounded", [("value", by_value), ("norm", by_norm)])
def test_steps_are_those_of_adamw_along_bounded_gradients(clip, bounded):
    """Each takes the rate of its number; a gradient within the bound stays as it is."""
    settings = options(clip=clip, clip_at=0.5, weight_decay=0.2, beta1=0.8, beta2=0.95)
    settings = replace(settings, decay="linear", warmup=0.3)
    gradients = [numbers(0, 0.1), numbers(1, 5.0), numbers(2), numbers(3)]
    assert_same(bounded(gradients[0]), gradients[0])
    found = run(settings, gradients, numbers(9), num_steps=4)
    assert_same(found, adamw(settings, list(map(bounded, gradients)), numbers(9)))
    unbounded = adamw(settings, gradients, numbers(9))[-1]["weight"]
    assert np.abs(found[-1]["weight"] - unbounded).max() > 1e-4


def test_batches_are_averaged_before_a_step():
    """Clipping, decay and rate are those of one step on the mean gradient."""
    together = options(clip="norm", clip_at=0.5, weight_decay=0.1, decay="linear", warmup=0.3)
    apart = options(**{**vars(together), "accumulate": 3})
    gradients = [numbers(seed) for seed in range(9)]
    means = [
        jax.tree.map(lambda *leaves: sum(leaves) / 3, *gradients[first : first + 3])
        for first in (0, 3, 6)
    ]
    reached = run(apart, gradients, numbers(9), num_steps=3)
    assert_same(reached[2::3], run(together, means, numbers(9), num_steps=3))
    assert_same(reached[3], reached[2], tolerance=0)  # no step between
