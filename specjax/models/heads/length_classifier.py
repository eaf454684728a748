"""DISCO's classifier: predicts whether the target will accept the next draft token (section 4).

A two-layer network reads the draft's distribution and the position of the token. A folder holds
`classifier.safetensors` (the weights) and `classifier.json` (the models it is for, the recipe).
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, Int, Key

from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user, new_folder
from specjax.models.io.head_files import made_by_run
from specjax.models.products import FULL_PRECISION
from specjax.models.shapes import shape_mismatches

NUM_TOP = 10  # the largest probabilities, which the classifier reads (footnote 4)
NUM_FEATURES = NUM_TOP + 2  # plus entropy and position

PositionKind = Literal[
    "draft", "generation"
]  # counted from the start of the draft or of the new text
LabelKind = Literal["match", "overlap"]  # equal greedy tokens, or 1 - total variation distance

WEIGHTS, METADATA = "classifier.safetensors", "classifier.json"
CLASSIFIER = "classifier"  # the folder of the classifier within that of its training run
FORMAT = "specjax length classifier 1"
METADATA_KINDS = {
    "hidden_size": int,
    "threshold": float | int,
    "position": str,
    "labels": str,
    "target": str,
    "draft": str,
    "scores": dict,
    "recipe": dict,
    "specjax_version": str,
}


class LengthClassifier(nn.Module):
    """Two layers: features `[..., 12]` of a draft token -> logit `[...]` that it is accepted.

    `sigmoid(logit)` is the paper's confidence C, which it compares with a threshold.
    """

    hidden_size: int = 64

    @nn.compact
    def __call__(self, features: Float[Array, "... 12"]) -> Float[Array, "..."]:
        hidden = nn.Dense(self.hidden_size, precision=FULL_PRECISION, name="hidden")(features)
        logit = nn.Dense(1, precision=FULL_PRECISION, name="logit")(nn.relu(hidden))
        return logit[..., 0]

    @nn.nowrap
    def run(self, params: Any, features: Float[Array, "... 12"]) -> Float[Array, "..."]:
        """Returns the logits; pure."""
        return jnp.asarray(self.apply({"params": params}, features))

    @nn.nowrap
    def initialise(self, key: Key[Array, ""]) -> dict[str, Any]:
        """Returns random params, float32."""
        return dict(self.init(key, jnp.zeros((NUM_FEATURES,)))["params"])


def features_of(probs: Float[Array, "B V"], position: Int[Array, " B"]) -> Float[Array, "B 12"]:
    """Returns the features of a draft token, float32.

    Args:
        probs: the distribution that the token is taken from: the softmax of the draft's logits,
            without temperature and filters, as in training.
        position: of that token, from 0: within the draft or within the new text, depending on
            `TrainedClassifier.position`.

    Returns:
        The ten largest probabilities in descending order (padded with zeros if V < 10), the entropy
        in nats, and `log(1 + position)`, which keeps far positions on the scale of the others.
    """
    return with_position(distribution_features(probs), position)


def distribution_features(probs: Float[Array, "... V"]) -> Float[Array, "... 11"]:
    """Returns the features other than the position: largest probabilities, then entropy."""
    probs = probs.astype(jnp.float32)
    count = min(NUM_TOP, probs.shape[-1])
    largest = jax.lax.top_k(probs, count)[0]
    missing = jnp.zeros((*probs.shape[:-1], NUM_TOP - count), jnp.float32)
    entropy = jnp.sum(jax.scipy.special.entr(probs), axis=-1, keepdims=True)
    return jnp.concatenate([largest, missing, entropy], axis=-1)


def with_position(
    features: Float[Array, "... 11"], position: Int[Array, "..."]
) -> Float[Array, "... 12"]:
    """Appends the position feature; positions count from 0."""
    scaled = jnp.log1p(position.astype(jnp.float32))
    return jnp.concatenate([features, scaled[..., None]], axis=-1)


# ---- Save and load -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TrainedClassifier:
    """A classifier with its weights, the two models it was trained for, and its scores."""

    params: Mapping[str, Any] = field(repr=False)
    hidden_size: int
    threshold: float  # the draft continues while sigmoid(logit) >= threshold
    position: PositionKind
    labels: LabelKind
    target: str  # fingerprints
    draft: str
    scores: Mapping[str, Any]  # on the validation prompts
    recipe: Mapping[str, Any]
    specjax_version: str

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


def save_classifier(classifier: TrainedClassifier, folder: str | Path) -> None:
    """Writes a new `folder`, completely or not at all.

    Raises:
        SpecjaxError: if `folder` already holds something, or cannot be written.
    """
    from safetensors.numpy import save_file

    values = {"format": FORMAT} | {name: getattr(classifier, name) for name in METADATA_KINDS}
    text = json.dumps(values, indent=1) + "\n"
    leaves = flatten_dict(classifier.params, sep=".").items()
    weights = {name: np.ascontiguousarray(leaf, np.float32) for name, leaf in leaves}
    with new_folder(Path(folder)) as unfinished:
        save_file(weights, unfinished / WEIGHTS)
        (unfinished / METADATA).write_text(text, encoding="utf-8")
        # safetensors lets only the owner read its file.
        shutil.copymode(unfinished / METADATA, unfinished / WEIGHTS)


def load_classifier(folder: str | Path) -> TrainedClassifier:
    """Reads a classifier that `save_classifier` wrote, or the one within a finished run.

    Raises:
        SpecjaxError: if the folder is missing, damaged, or not a length classifier.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    folder = made_by_run(expand_user(folder), CLASSIFIER)
    values = _read_metadata(folder / METADATA)
    try:
        weights = load_file(folder / WEIGHTS)
        wrong = _contradiction(weights, values["hidden_size"])
    except (SafetensorError, OSError) as error:
        weights, wrong = {}, str(error)
    if wrong:
        raise SpecjaxError(
            f"{folder / WEIGHTS} is damaged or does not match {METADATA} ({wrong}); copy or train "
            "the length classifier again"
        )
    arrays = {name: jnp.asarray(weight) for name, weight in weights.items()}
    return TrainedClassifier(unflatten_dict(arrays, sep="."), **values)


def _read_metadata(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        raise SpecjaxError(
            f"{file.parent} is not a length classifier: {file.name} cannot be read; check the path "
            "or train one"
        ) from None
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or values.get("format") != FORMAT or not _is_whole(values):
        raise SpecjaxError(
            f"{file} is damaged or does not describe a {FORMAT!r}; copy or train the length "
            "classifier again"
        )
    return {name: values[name] for name in METADATA_KINDS} | {
        "threshold": float(values["threshold"])
    }


def _is_whole(values: Mapping[str, Any]) -> bool:
    return (
        all(isinstance(values.get(name), kind) for name, kind in METADATA_KINDS.items())
        and values["hidden_size"] > 0
        and 0 < values["threshold"] < 1
        and values["position"] in get_args(PositionKind)
        and values["labels"] in get_args(LabelKind)
    )


def _contradiction(weights: Mapping[str, np.ndarray], hidden_size: int) -> str:
    """Returns how the weights contradict the hidden size; empty if they agree."""
    if complaints := shape_mismatches(weights, LengthClassifier(hidden_size)):
        return complaints
    odd = [
        name
        for name, weight in weights.items()
        if weight.dtype != np.float32 or not np.isfinite(weight).all()
    ]
    return f"not finite float32: {', '.join(odd)}" if odd else ""
