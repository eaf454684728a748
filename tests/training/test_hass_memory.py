"""What gradients keep grows by HASS's step; recomputed, it is little, whatever the vocabulary."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.config import TransformerConfig
from specjax.models.heads.eagle import EagleConfig, EagleHead
from specjax.models.transformer import Transformer
from specjax.training.objectives import slots as slot_values
from specjax.training.objectives.eagle import eagle_loss
from specjax.training.objectives.hass import hass_loss
from specjax.training.objectives.options import EagleObjective, HassObjective

WIDTH = 32


class Program:
    """A training step over two texts of T tokens, of which nothing is run."""

    length, vocabulary = 128, 1024

    def __init__(self, align_steps: int | None, recompute: bool):
        """Of HASS's steps; of EAGLE's one if they are None."""
        config = TransformerConfig(self.vocabulary, WIDTH, 48, 1, 4, 2, 8)
        target, head = Transformer(config), EagleHead(EagleConfig.for_target(config))
        if align_steps is None:
            self.loss = eagle_loss(head, target, EagleObjective(), recompute)
        else:
            self.loss = hass_loss(head, target, HassObjective(align_steps=align_steps), recompute)
        ints, bools = (jax.ShapeDtypeStruct((2, self.length), kind) for kind in (jnp.int32, bool))
        batch = {"tokens": ints, "segments": ints, "positions": ints, "is_answer": bools}
        self.arguments = (
            jax.eval_shape(lambda: head.initialise(jax.random.key(0))),
            jax.eval_shape(lambda: target.initialise(jax.random.key(0))),
            batch,
            jax.eval_shape(lambda: jax.random.key(0)),
        )

    def kept(self) -> int:
        """Bytes kept for the gradients once the loss is known."""

        def backward(params, *others):
            return jax.vjp(lambda params: self.loss(params, *others)[0], params)[1]

        arrays = jax.tree.leaves(jax.eval_shape(backward, *self.arguments))
        return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)

    def compiled(self) -> int:
        """Bytes that the whole program needs beside its arguments and results."""
        measure = jax.jit(jax.value_and_grad(self.loss, has_aux=True))
        analysis = measure.lower(*self.arguments).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes


@pytest.mark.parametrize("recompute", [False, True])
def test_what_gradients_need_grows_by_the_step(recompute):
    """Not by its square: steps see each other's keys and values, none has a copy for each other.

    But for diagonals: step n keeps n - 1 of keys and values moved by some slots, which is 1% here.
    """
    growth = np.diff([Program(steps, recompute).kept() for steps in (1, 2, 3, 4, 5)])
    assert growth[0] > 0
    assert np.abs(np.diff(growth)).max() < 0.02 * growth[0]


def test_recomputing_keeps_features_keys_and_values_of_each_step():
    """No `[T, T]` of attention and no `[T, V]` of logits, which are the most by far."""
    again, kept = (
        np.diff([Program(steps, recompute).kept() for steps in (2, 3)])[0]
        for recompute in (True, False)
    )
    slots = 2 * Program.length
    keys_and_values = 2 * 2 * 8
    assert again <= 4 * slots * (WIDTH + keys_and_values) + 100  # and a few scalars
    assert kept > 4 * slots * (4 * Program.length + Program.vocabulary)


def test_four_steps_compile_to_less_than_twice_the_memory_of_one():
    one, four = (Program(steps, recompute=True).compiled() for steps in (1, 4))
    assert one < four < 2 * one


class Wide(Program):
    """Logits are the most by far: those of all slots are 34 MB, a `[T, T]` of attention is 8."""

    length, vocabulary = 512, 8192
    all_logits = 4 * 2 * length * vocabulary  # bytes


class Narrow(Wide):
    vocabulary = 64


def test_recomputing_never_has_the_logits_of_all_slots(monkeypatch):
    """By 16 chunks, all that a vocabulary adds is less than one array of all logits.

    Without, the logits wanted, the predicted ones, their softmax and their gradients are all there:
    more than four arrays on top.
    """
    monkeypatch.setattr(slot_values, "LOGIT_SLOTS", Wide.length // 16)
    again, kept = (Wide(3, recompute).compiled() for recompute in (True, False))
    assert again - Narrow(3, recompute=True).compiled() < Wide.all_logits
    assert kept - again > 4 * Wide.all_logits
