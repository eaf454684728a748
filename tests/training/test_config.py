"""The ranges of all options, and what is outside them."""

import math
import re

import jax
import pytest

from specjax.core.errors import SpecjaxError
from specjax.run.distillation import DistillOptions
from specjax.training.data import DataOptions
from specjax.training.loop import LoopOptions
from specjax.training.losses import TOP_LOSSES
from specjax.training.objectives.eagle import EagleTraining
from specjax.training.objectives.hass import HassTraining
from specjax.training.objectives.length_classifier import ClassifierTraining
from specjax.training.objectives.medusa import MedusaTraining
from specjax.training.optimizer import OptimizerOptions

STEPS = ("num_steps", "save_every", "log_every", "eval_every", "keep_last")
WEIGHTS = ("feature_weight", "logit_weight", "noise", "step_decay", "top_weight")
NOT_POSITIVE = (0.0, -1.0, math.inf, math.nan)
NEGATIVE = (-0.1, math.inf, math.nan)
POSITIVE, AT_LEAST_ONE = "is not a finite number above 0", "must be at least 1"
NOT_NEGATIVE = "is not a finite number >= 0"
RULES = [  # kind, names, values, complaint
    (LoopOptions, STEPS, (0, -3), AT_LEAST_ONE),
    (LoopOptions, ("seed",), (-1, 2**32), "is not between 0 and 2**32 - 1"),
    (OptimizerOptions, ("learning_rate", "clip_at"), NOT_POSITIVE, POSITIVE),
    (OptimizerOptions, ("warmup", "decay_to", "beta1", "beta2"), (-0.1, 1.0, math.nan),
     "is outside [0, 1)"),
    (OptimizerOptions, ("weight_decay",), NEGATIVE, NOT_NEGATIVE),
    (OptimizerOptions, ("accumulate",), (0, -1), AT_LEAST_ONE),
    (EagleTraining, WEIGHTS[:3], NEGATIVE, NOT_NEGATIVE),
    (HassTraining, WEIGHTS, NEGATIVE, NOT_NEGATIVE),
    (HassTraining, ("align_steps", "top_k"), (0, -1), AT_LEAST_ONE),
    (HassTraining, ("token_alignment",), (-0.1, 1.1, math.nan), "is outside [0, 1]"),
    (HassTraining, ("top_p",), (-0.1, 0.0, 1.1, math.nan), "is outside (0, 1]"),
    (MedusaTraining, ("head_decay",), NEGATIVE, NOT_NEGATIVE),
    (DistillOptions, ("distill_temperature",), NEGATIVE, NOT_NEGATIVE),
    (DistillOptions, ("distill_tokens", "distill_batch"), (0, -1), AT_LEAST_ONE),
    (ClassifierTraining, ("hidden_size", "num_steps", "batch_size"), (0, -1), AT_LEAST_ONE),
    (ClassifierTraining, ("learning_rate",), NOT_POSITIVE, POSITIVE),
    (ClassifierTraining, ("validation_fraction",), (0.0, 1.0, math.nan), "is outside (0, 1)"),
]  # fmt: skip
REFUSED = [
    *(
        (kind, {name: value}, f"{name} {value!r} {complaint}")
        for kind, names, values, complaint in RULES
        for name in names
        for value in values
    ),
    (DataOptions, {"batch_size": 0}, "batches of 0 texts of up to 2048 tokens; take at least 1"),
    (DataOptions, {"longest": 2}, "up to 2 tokens; take at least 1 text and 3 tokens"),
    (DataOptions, {"packing": True, "buckets": (64, 2048)}, "give no buckets"),
    *(
        (DataOptions, {"buckets": buckets}, "must grow and end with the longest length, 2048")
        for buckets in ((128, 64, 2048), (64, 64, 2048), (64, 1024), (64, 4096))
    ),
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
        (HassTraining(), "top_loss", ", ".join(TOP_LOSSES)),
        (ClassifierTraining(), "position", "draft, generation"),
        (ClassifierTraining(), "labels", "match, overlap"),
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
        (EagleTraining, dict.fromkeys(WEIGHTS[:3], 0.0)),
        (HassTraining, {"align_steps": 1, **dict.fromkeys(WEIGHTS, 0.0)}),
        (HassTraining, {"top_k": 1, "top_p": 1.0, "token_alignment": 1.0}),
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
def test_rows_are_padded_to_powers_of_two_or_as_asked(options, lengths):
    assert options.lengths() == lengths
