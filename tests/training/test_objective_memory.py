"""Memory of gradients grows with steps or depth; recomputing saves it. Logits are not kept."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.config import TransformerConfig
from specjax.models.transformer import Transformer
from specjax.training.objectives.base import HeadTraining
from specjax.training.objectives.hass import HassTraining
from specjax.training.objectives.parallel_spec import ParallelEagleTraining

WIDTH = 32
KEYS_AND_VALUES = 2 * 2 * 8  # of a slot and layer


LENGTH, VOCAB = 128, 1024


def program(training: HeadTraining, recompute: bool) -> tuple[Any, tuple]:
    """The loss of two texts, of which nothing is run, and the shapes of its arguments."""
    config = TransformerConfig(VOCAB, WIDTH, 48, 1, 4, 2, 8)
    target, head = Transformer(config), training.new_head(config)
    ints, bools = (jax.ShapeDtypeStruct((2, LENGTH), kind) for kind in (jnp.int32, bool))
    batch = {"tokens": ints, "segments": ints, "positions": ints, "is_answer": bools}
    key = jax.eval_shape(lambda: jax.random.key(0))
    params, frozen = (jax.eval_shape(module.initialise, key) for module in (head, target))
    return training.loss(head, target, recompute), (params, frozen, batch, key)


@cache
def kept(training: HeadTraining, recompute: bool) -> int:
    """Bytes kept for the gradients once the loss is known."""
    loss, arguments = program(training, recompute)

    def backward(params, *others):
        return jax.vjp(lambda params: loss(params, *others)[0], params)[1]

    arrays = jax.tree.leaves(jax.eval_shape(backward, *arguments))
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)


def temporary(training: HeadTraining) -> int:
    """Bytes that the whole program needs beside its arguments and results."""
    loss, arguments = program(training, recompute=True)
    measure = jax.jit(jax.value_and_grad(loss, has_aux=True))
    analysis = measure.lower(*arguments).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def growth(trainings: Sequence[HeadTraining], recompute: bool) -> np.ndarray:
    return np.diff([kept(training, recompute) for training in trainings])


def hass(*steps: int) -> list[HassTraining]:
    return [HassTraining(align_steps=each) for each in steps]


def test_what_gradients_need_grows_by_the_step():
    """Not by its square: steps see each other's keys and values, none has a copy for each other.

    But for diagonals: step n keeps n - 1 of keys and values moved by some slots, which is 1% here.
    """
    for recompute in (False, True):
        by_step = growth(hass(1, 2, 3), recompute)
        assert by_step[0] > 0
        assert np.abs(np.diff(by_step)).max() < 0.02 * by_step[0]


@pytest.mark.parametrize(
    "trainings, own",
    [
        (hass(2, 3), 4 * 2 * LENGTH * WIDTH),  # features
        ([ParallelEagleTraining(num_masks=each) for each in (1, 2)], 4 * WIDTH),  # a mask
    ],
    ids=["hass", "parallel-eagle"],
)
def test_recomputing_keeps_keys_and_values_of_each_step(trainings, own):
    """No `[T, T]` of attention, which is the most by far."""
    slots = 2 * LENGTH
    (again,), (kept,) = (growth(trainings, recompute) for recompute in (True, False))
    slope = 4 * slots * WIDTH  # of what each step or depth predicts
    assert again <= 4 * slots * KEYS_AND_VALUES + slope + own + 100  # and a few scalars
    assert kept > 4 * slots * 4 * LENGTH


@pytest.mark.slow
def test_four_steps_compile_to_less_than_twice_the_memory_of_one():
    one, four = map(temporary, hass(1, 4))
    assert one < four < 2 * one
