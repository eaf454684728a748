"""The options of training: how they combine, and the published defaults."""

import pytest

from specjax.core.settings import SettingError
from specjax.training.data import DataOptions
from specjax.training.objectives.eagle import EagleTraining
from specjax.training.objectives.hass import HassTraining
from specjax.training.objectives.hydra import HydraTraining
from specjax.training.objectives.medusa import MedusaTraining
from specjax.training.objectives.parallel_spec import ParallelEagleTraining

COMBINED = [
    (EagleTraining, {"noise": -1.0}, "noise"),  # the constructor checks fields
    (HassTraining, {"top_loss": "bild", "top_k": 1}, "top_k"),
    (DataOptions, {"packing": True, "buckets": (64, 2048)}, "buckets"),
    *((DataOptions, {"buckets": sizes}, "buckets") for sizes in ((128, 64, 2048), (64, 1024))),
]


@pytest.mark.parametrize(("kind", "values", "name"), COMBINED, ids=str)
def test_options_check_their_fields_and_how_they_combine(kind, values, name):
    with pytest.raises(SettingError) as caught:
        kind(**values)
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("kind", "published"),
    [
        (EagleTraining, {"feature_weight": 1.0, "logit_weight": 0.1, "noise": 0.2}),
        (HassTraining, {"align_steps": 3, "step_decay": 1.0, "token_alignment": 0.0}),
        (HassTraining, {"top_loss": "top-k", "top_weight": 1.0, "top_k": 10}),
        (MedusaTraining, {"head_decay": 0.8, "top_weight": 0.0}),
        (HydraTraining, {"num_heads": 4, "num_layers": 4, "lm_heads": True}),
        (ParallelEagleTraining, {"num_masks": 4, "num_layers": 1}),
    ],
)
def test_the_defaults_are_the_published_ones(kind, published):
    assert vars(kind()).items() >= published.items()


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        (DataOptions(), (64, 128, 256, 512, 1024, 2048)),
        (DataOptions(longest=200), (64, 128, 200)),
        (DataOptions(longest=10), (10,)),
        (DataOptions(longest=200, packing=True), (200,)),
        (DataOptions(longest=200, buckets=(50, 200)), (50, 200)),
    ],
)
def test_texts_are_padded_to_powers_of_two_or_to_the_given_lengths(options, lengths):
    assert options.lengths() == lengths
