"""What a run can be told, and what it refuses."""

import math
import re

import jax
import pytest

from specjax.core.errors import SpecjaxError
from specjax.training.config import (
    DataOptions,
    DistillOptions,
    HeadSettings,
    LoopOptions,
    OptimizerOptions,
)
from specjax.training.losses import TOP_LOSSES
from specjax.training.objectives.options import EagleObjective, HassObjective

SETTINGS = (EagleObjective, HassObjective)
WEIGHTS = ("feature_weight", "logit_weight", "noise")


def each(kinds, names, values, complaint):
    """Every value for every name of every kind: each is refused with the complaint."""
    return [
        (kind, {name: value}, f"{name} {value!r} {complaint}")
        for kind in kinds
        for name in names
        for value in values
    ]


REFUSED = [
    *each(
        [LoopOptions],
        ("num_steps", "save_every", "log_every", "eval_every", "keep_last"),
        (0, -3),
        "must be at least 1",
    ),
    *each([LoopOptions], ["seed"], (-1, 2**32), "is not between 0 and 2**32 - 1"),
    *each(
        [OptimizerOptions],
        ("learning_rate", "clip_at"),
        (0.0, -1.0, math.inf, math.nan),
        "is not a finite number above 0",
    ),
    *each(
        [OptimizerOptions],
        ("warmup", "beta1", "beta2"),
        (-0.1, 1.0, math.nan),
        "is outside [0, 1)",
    ),
    *each(
        [OptimizerOptions],
        ["weight_decay"],
        (-0.1, math.inf, math.nan),
        "is negative or not finite",
    ),
    *each([OptimizerOptions], ["accumulate"], (0, -1), "must be at least 1"),
    *each(SETTINGS, WEIGHTS, (-0.1, math.inf, math.nan), "is not a finite number >= 0"),
    *each(
        [HassObjective],
        ("step_decay", "top_weight"),
        (-0.1, math.inf, math.nan),
        "is not a finite number >= 0",
    ),
    *each([HassObjective], ("align_steps", "top_k"), (0, -1), "must be at least 1"),
    *each(
        [HassObjective],
        ("token_alignment", "top_p"),
        (-0.1, 1.1, math.nan),
        "is outside [0, 1]",
    ),
    (HassObjective, {"top_p": 0.0}, "top_p 0 keeps no token; take one above 0"),
    *each(
        [DistillOptions],
        ["distill_temperature"],
        (-0.1, math.inf, math.nan),
        "is not a finite number >= 0",
    ),
    *each([DistillOptions], ["distill_tokens"], (0, -1), "must be at least 1"),
    (DataOptions, {"batch_size": 0}, "batches of 0 texts of up to 2048 tokens; take at least 1"),
    (DataOptions, {"longest": 2}, "batches of 8 texts of up to 2 tokens; take at least 1 and 3"),
    (DataOptions, {"packing": True, "buckets": (64, 2048)}, "give no buckets"),
    (DataOptions, {"buckets": (128, 64, 2048)}, "must grow and end with the longest length, 2048"),
    (DataOptions, {"buckets": (64, 64, 2048)}, "must grow and end with the longest length, 2048"),
    (DataOptions, {"buckets": (64, 1024)}, "must grow and end with the longest length, 2048"),
]


@pytest.mark.parametrize(
    ("kind", "values", "complaint"),
    REFUSED,
    ids=[f"{kind.__name__}-{values}" for kind, values, _ in REFUSED],
)
def test_a_value_out_of_its_range_is_refused(kind, values, complaint):
    with pytest.raises(SpecjaxError, match=re.escape(complaint)):
        kind(**values)


@pytest.mark.parametrize(
    ("options", "name", "known"),
    [
        (OptimizerOptions(), "decay", "linear, cosine, none"),
        (OptimizerOptions(), "clip", "value, norm, none"),
        (HassObjective(), "top_loss", ", ".join(TOP_LOSSES)),
    ],
)
def test_an_unknown_word_is_refused(options, name, known):
    """Set past the constructor, whose type checks, on in tests only, are first to complain."""
    object.__setattr__(options, name, "other")
    with pytest.raises(SpecjaxError, match=re.escape(f"{name} 'other' is unknown; use {known}")):
        options.__post_init__()


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (LoopOptions, {"seed": 2**32 - 1, "num_steps": 1, "keep_last": 1}),
        (OptimizerOptions, {"warmup": 0.0, "beta1": 0.0, "weight_decay": 0.0, "clip": "none"}),
        *((kind, dict.fromkeys(WEIGHTS, 0.0)) for kind in SETTINGS),
        (HassObjective, {"align_steps": 1, "step_decay": 0.0, "top_weight": 0.0}),
        (HassObjective, {"top_k": 1, "top_p": 1.0, "token_alignment": 1.0}),
        (DistillOptions, {"distill_temperature": 0.0, "distill_tokens": 1}),
        (DataOptions, {"batch_size": 1, "longest": 3}),
    ],
)
def test_a_value_at_the_end_of_its_range_is_taken(kind, values):
    assert {name: getattr(kind(**values), name) for name in values} == values


def test_every_seed_makes_its_own_key():
    seeds = (0, 1, 2**31 - 1, 2**31, 2**32 - 1)
    keys = [tuple(jax.random.key_data(jax.random.key(seed)).tolist()) for seed in seeds]
    assert len(set(keys)) == len(seeds)


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        (DataOptions(), (64, 128, 256, 512, 1024, 2048)),
        (DataOptions(longest=200), (64, 128, 200)),
        (DataOptions(longest=64), (64,)),
        (DataOptions(longest=10), (10,)),
        (DataOptions(longest=200, packing=True), (200,)),
        (DataOptions(longest=200, buckets=(50, 200)), (50, 200)),
    ],
)
def test_rows_are_padded_to_powers_of_two_or_as_told(options, lengths):
    assert options.lengths() == lengths


def test_the_method_is_that_of_the_objective():
    assert HeadSettings(EagleObjective()).method == "eagle"
    assert HeadSettings(HassObjective()).method == "hass"
