"""Reads and writes DISCO's length classifier.

A folder holds `classifier.safetensors` (the weights) and `classifier.json` (everything else).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError
from safetensors.numpy import load_file

from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user, read_json, save_arrays
from specjax.core.settings import check_setting, setting
from specjax.models.heads.length_classifier import LengthClassifier, PositionKind
from specjax.models.io.head_files import made_by_run
from specjax.models.shapes import shape_mismatches

WEIGHTS, METADATA = "classifier.safetensors", "classifier.json"
CLASSIFIER = "classifier"  # the folder of the classifier within that of its training run
FORMAT = "specjax length classifier 1"


@dataclass(frozen=True, eq=False)
class TrainedClassifier:
    """A classifier with its weights, the two models it was trained for, and its scores."""

    params: Mapping[str, Any] = field(repr=False)
    position: PositionKind
    target: str  # fingerprints
    draft: str
    scores: Mapping[str, Any]  # on the validation prompts
    recipe: Mapping[str, Any]
    specjax_version: str
    hidden_size: int = setting(at_least=1)
    threshold: float = setting(above=0, below=1)  # drafting continues while sigmoid(logit) >= this

    @property
    def model(self) -> LengthClassifier:
        """The network of `params`."""
        return LengthClassifier(self.hidden_size)

    def check_owner(self, target: str, draft: str) -> None:
        """Raises SpecjaxError unless it was trained for the models with these fingerprints."""
        if (self.target, self.draft) != (target, draft):
            raise SpecjaxError(
                f"the length classifier was trained for target {self.target} with draft "
                f"{self.draft}, but these are target {target} and draft {draft}; train one for "
                "these models"
            )


METADATA_FIELDS = tuple(entry.name for entry in fields(TrainedClassifier)[1:])


def save_classifier(classifier: TrainedClassifier, folder: str | Path) -> None:
    """Writes a new `folder`, completely or not at all."""
    values = {"format": FORMAT} | {name: getattr(classifier, name) for name in METADATA_FIELDS}
    leaves = flatten_dict(classifier.params, sep=".").items()
    weights = {name: np.ascontiguousarray(leaf, np.float32) for name, leaf in leaves}
    save_arrays(Path(folder), "classifier", weights, values)


def load_classifier(folder: str | Path) -> TrainedClassifier:
    """Reads a classifier that `save_classifier` wrote, or the one within a finished run."""
    folder = made_by_run(expand_user(folder), CLASSIFIER)
    try:
        values, weights = read_json(folder / METADATA), load_file(folder / WEIGHTS)
        _check(values, weights)
    except (SpecjaxError, SafetensorError, OSError) as error:
        raise SpecjaxError(
            f"{folder} is damaged or not a length classifier ({error}); copy it again, or train a "
            "classifier"
        ) from None
    params = unflatten_dict({name: jnp.asarray(leaf) for name, leaf in weights.items()}, sep=".")
    return TrainedClassifier(params, **{name: values[name] for name in METADATA_FIELDS})


def _check(values: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> None:
    """Raises SpecjaxError unless these describe a classifier."""
    if values.get("format") != FORMAT:
        raise SpecjaxError(f"{METADATA} is not of format {FORMAT!r}")
    for name in METADATA_FIELDS:
        check_setting(TrainedClassifier, name, values.get(name))
    if any(leaf.dtype != np.float32 or not np.isfinite(leaf).all() for leaf in weights.values()):
        raise SpecjaxError("the weights are not finite float32")
    if wrong := shape_mismatches(weights, LengthClassifier(values["hidden_size"])):
        raise SpecjaxError(wrong)
