"""How DISCO's length classifier is trained and judged (section 4, appendix D).

The paper gives no width, rate or number of steps: those of `ClassifierSettings` are ours. Its
threshold is tuned for latency, ours for F1 on the validation prompts, which is what it reports; the
validation scores are therefore a little flattering.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Key

from specjax import __version__
from specjax.core.errors import SpecjaxError
from specjax.models.heads.length_classifier import (
    LabelKind,
    LengthClassifier,
    PositionKind,
    TrainedClassifier,
    save_classifier,
)
from specjax.models.io.checkpoint import vacant
from specjax.training.acceptance_scores import best_static_length, best_threshold, scores_of
from specjax.training.config import LoopOptions
from specjax.training.data import from_function
from specjax.training.draft_features import DraftFeatures, read_drafts, split_by_prompt
from specjax.training.draft_reading import FrozenModel, Text, check_vocabularies
from specjax.training.loop import LossFn, train

Ids = Sequence[int]
Generate = Callable[[Sequence[Ids]], Sequence[Ids]]  # prompts -> their continuations


@dataclass(frozen=True)
class ClassifierSettings:
    """Everything that decides the classifier, apart from the models and the prompts.

    Raises:
        SpecjaxError: for a value out of its range.
    """

    hidden_size: int = 64
    position: PositionKind = "draft"
    labels: LabelKind = "match"
    num_steps: int = 3000
    batch_size: int = 512  # tokens
    learning_rate: float = 3e-3  # falls to zero over the run, by a cosine
    weight_decay: float = 1e-4
    validation_fraction: float = 0.15  # of the prompts
    seed: int = 0

    def __post_init__(self):
        for name in ("hidden_size", "num_steps", "batch_size"):
            if getattr(self, name) < 1:
                raise SpecjaxError(f"{name} {getattr(self, name)} must be at least 1")
        if not 0 < self.validation_fraction < 1:
            raise SpecjaxError(
                f"validation_fraction {self.validation_fraction} is outside (0, 1); try 0.15"
            )
        if not 0 < self.learning_rate < float("inf"):
            raise SpecjaxError(f"learning_rate {self.learning_rate} is not above 0; try 0.003")
        for name, kind in (("position", PositionKind), ("labels", LabelKind)):
            if getattr(self, name) not in get_args(kind):
                known = " or ".join(get_args(kind))
                raise SpecjaxError(f"{name} {getattr(self, name)!r} is unknown; use {known}")


def train_classifier(
    target: FrozenModel,
    draft: FrozenModel,
    prompts: Sequence[Ids],
    generate: Generate,
    settings: ClassifierSettings,
    out: str | Path,
    run_folder: str | Path | None = None,
) -> TrainedClassifier:
    """Lets the target write, trains the classifier on the draft's mistakes, and saves it.

    Args:
        target: with the fingerprint that the classifier is to carry.
        draft: likewise.
        prompts: rows of token ids.
        generate: the target's continuations of all of them, its end token included; greedy, for
            the labels to mean what they say. The whole list goes in, so that it may batch.
        settings: see there.
        out: new folder for the classifier.
        run_folder: for checkpoints and metrics, should the training be worth resuming.

    Raises:
        SpecjaxError: if `out` is taken, the models do not fit together, the prompts are too few or
            their labels all the same, or files cannot be written.
    """
    out = vacant(Path(out))  # before the texts, which take long
    if run_folder is not None and out.resolve() in (
        Path(run_folder).resolve(),
        *Path(run_folder).resolve().parents,
    ):
        raise SpecjaxError(f"the run folder {run_folder} lies in {out}; give it a place of its own")
    check_vocabularies(target, draft)
    continuations = generate(prompts)
    texts = [Text(*pair) for pair in zip(prompts, continuations, strict=True)]
    data = read_drafts(texts, target, draft, settings.position, settings.labels)
    params, scores = fit(data, settings, run_folder)
    trained = TrainedClassifier(
        params=params,
        hidden_size=settings.hidden_size,
        threshold=scores["threshold"],
        position=settings.position,
        labels=settings.labels,
        target=target.fingerprint,
        draft=draft.fingerprint,
        scores=scores,
        recipe=asdict(settings) | {"num_prompts": len(prompts), "num_tokens": len(data.labels)},
        specjax_version=__version__,
    )
    save_classifier(trained, out)
    return trained


def fit(
    data: DraftFeatures, settings: ClassifierSettings, run_folder: str | Path | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Trains on a part of the prompts and validates on the rest: params, scores.

    Raises:
        SpecjaxError: for fewer than two prompts, or where one part has labels of one kind only.
    """
    training, validation = split_by_prompt(data, settings.validation_fraction, settings.seed)
    for name, part in (("training", training), ("validation", validation)):
        _check_both_kinds(part.is_match, name)
    model = LengthClassifier(settings.hidden_size)
    decay = optax.cosine_decay_schedule(settings.learning_rate, settings.num_steps)
    checksum = zlib.crc32(training.features.tobytes() + training.labels.tobytes())
    trained = train(
        loss_of(model),
        model.initialise(jax.random.key(settings.seed)),
        from_function(batch_of(training, settings.batch_size, settings.seed)),
        optax.adamw(decay, weight_decay=settings.weight_decay),
        LoopOptions(settings.num_steps, seed=settings.seed),
        run_folder,
        config=asdict(settings) | {"data": checksum},
    )
    return trained.params, validate(model, trained.params, validation)


def loss_of(model: LengthClassifier) -> LossFn:
    """The loss for `training.loop`: cross-entropy of the acceptance, hard or soft labels."""

    def loss_fn(params: Any, frozen: None, batch: dict[str, Array], key: Key[Array, ""]):
        logits = model.run(params, batch["features"])
        losses = optax.sigmoid_binary_cross_entropy(logits, batch["labels"])
        is_right = (logits >= 0) == (batch["labels"] >= 0.5)
        return jnp.mean(losses), {"accuracy": jnp.mean(is_right.astype(jnp.float32))}

    return loss_fn


def batch_of(
    data: DraftFeatures, batch_size: int, seed: int
) -> Callable[[int], dict[str, np.ndarray]]:
    """Batches of tokens drawn with replacement; that of a step depends on it and `seed` alone."""

    def batch_at(step: int) -> dict[str, np.ndarray]:
        rows = np.random.default_rng((seed, step)).integers(len(data.labels), size=batch_size)
        return {"features": data.features[rows], "labels": data.labels[rows]}

    return batch_at


def _check_both_kinds(is_match: Bool[np.ndarray, " N"], part: str) -> None:
    if is_match.all() or not is_match.any():
        kind = "accepted" if is_match.all() else "rejected"
        raise SpecjaxError(
            f"all {len(is_match)} draft tokens of the {part} prompts would be {kind}, so there is "
            "nothing to tell apart; give more or other prompts, or another draft"
        )


def validate(model: LengthClassifier, params: Any, data: DraftFeatures) -> dict[str, Any]:
    """Scores of the classifier at its best threshold, and of the best static length.

    What is predicted is the acceptance at temperature 0, whatever the labels of the training. A
    static rule predicts that the first `static_length` tokens of a draft are accepted and the
    others are not; the baseline may choose its length as the classifier its threshold, and null is
    a draft of unlimited length.
    """
    confidence = np.asarray(jax.nn.sigmoid(model.run(params, jnp.asarray(data.features))))
    threshold = best_threshold(confidence, data.is_match)
    static_length = best_static_length(data.depth, data.is_match)
    always = np.ones_like(data.is_match)
    static = always if static_length is None else data.depth < static_length
    return {
        "threshold": threshold,
        **scores_of(confidence >= threshold, data.is_match),
        "static_length": static_length,
        "static_f1": scores_of(static, data.is_match)["f1"],
        "acceptance_rate": float(np.mean(data.is_match)),
        "num_tokens": len(data.is_match),
    }


def test_scores(trained: TrainedClassifier, data: DraftFeatures) -> dict[str, Any]:
    """Scores on other texts, with the threshold and the static length that validation chose."""
    features = jnp.asarray(data.features)
    confidence = np.asarray(jax.nn.sigmoid(trained.model.run(trained.params, features)))
    length = trained.scores["static_length"]
    static = np.ones_like(data.is_match) if length is None else data.depth < length
    return {
        **scores_of(confidence >= trained.threshold, data.is_match),
        "static_f1": scores_of(static, data.is_match)["f1"],
        "num_tokens": len(data.is_match),
    }
