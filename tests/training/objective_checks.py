"""What the loss of every objective passes: masks, recomputation and precision.

`measure` is what `measure_of` makes of a loss, `params` are those of the head that it trains.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.models.test_eagle_head import gradients_differ_by
from tests.training.literal import FROZEN, KEY, PACKED, VOCAB, assert_same, batch_of

Measure = Callable[..., Any]  # params, the target's, batch, key -> (loss, metrics), gradient


def measure_of(loss: Callable) -> Measure:
    """Loss, metrics and gradient, compiled."""
    return jax.jit(jax.value_and_grad(loss, has_aux=True))


# ---- Masks ---------------------------------------------------------------------------------------


def check_padding(measure: Measure, params: Any) -> None:
    """What stands in padding changes nothing."""
    batch = batch_of(PACKED)
    padding = batch["segments"] == 0
    assert padding.sum() == 5
    filled = {
        "tokens": np.where(padding, 7, batch["tokens"]),
        "is_answer": batch["is_answer"] | padding,
        "positions": np.where(padding, 90, batch["positions"]),
    }
    (loss, _), gradient = measure(params, FROZEN, batch, KEY)
    (again, _), same = measure(params, FROZEN, batch | filled, KEY)
    assert_same((again, same), (loss, gradient), tolerance=1e-6)


def check_no_slot(measure: Measure, params: Any) -> None:
    """One row is all padding, and in the other only tokens that no slot predicts are answers."""
    batch = batch_of(((0,), ()))
    batch["is_answer"][:] = batch["positions"] < 2
    for leaf in jax.tree.leaves(measure(params, FROZEN, batch, KEY)):
        np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


def check_other_slots(measure: Measure, params: Any, shift: int) -> None:
    """Slots counted `shift` places later would be caught."""
    batch = batch_of(PACKED)
    (loss, _), gradient = measure(params, FROZEN, batch, KEY)
    batch["is_answer"] = np.roll(batch["is_answer"], shift, axis=1)
    (moved, _), other = measure(params, FROZEN, batch, KEY)
    assert abs(loss - moved) > 1e-3 * loss
    assert gradients_differ_by(other, gradient) > 1e-2


# ---- Recomputation and precision -----------------------------------------------------------------


def check_recomputing(
    measure: Measure, loss: Callable, params: Any, batch: Any = None, tolerance: float = 1e-6
) -> None:
    """`loss`, which recomputes, says what `measure` says, which keeps everything."""
    arguments = (params, FROZEN, batch or batch_of(PACKED), KEY)
    (kept, kept_metrics), kept_gradient = measure(*arguments)
    (again, metrics), gradient = measure_of(loss)(*arguments)
    assert_same((again, gradient), (kept, kept_gradient), tolerance)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=tolerance), metrics, kept_metrics)


def check_chunks(make_loss: Callable[[bool], Callable], params: Any) -> None:
    """12 slots a row in chunks of 4; without recomputation their logits are there at once."""
    arguments = (params, FROZEN, batch_of(PACKED), KEY)
    kept, again = (
        str(jax.make_jaxpr(jax.value_and_grad(make_loss(recompute), has_aux=True))(*arguments))
        for recompute in (False, True)
    )
    assert f"f32[2,12,{VOCAB}]" in kept and f"f32[2,12,{VOCAB}]" not in again
    assert f"f32[2,4,{VOCAB}]" in again
    assert f",4,{VOCAB}]" not in again.replace(f"f32[2,4,{VOCAB}]", "")  # of all chunks


def check_bfloat16_target(measure: Measure, params: Any, batch: Any = None) -> None:
    """The params and all that is told stay float32, and the gradient points where it did."""
    batch = batch or batch_of(PACKED)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), FROZEN)
    (loss, metrics), gradient = measure(params, narrow, batch, KEY)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((loss, metrics, gradient)))
    (wide, _), wide_gradient = measure(params, FROZEN, batch, KEY)
    np.testing.assert_allclose(loss, wide, rtol=0.05)
    for own, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(wide_gradient), strict=True):
        assert np.vdot(own, other) > 0.9 * np.linalg.norm(own) * np.linalg.norm(other)
