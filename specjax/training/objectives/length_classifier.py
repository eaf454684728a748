"""Trains and scores DISCO's length classifier (section 4, appendix D).

The paper gives no width, rate or number of steps; those of `ClassifierTraining` are ours. It tunes
the threshold for latency; ours is tuned for F1 on the validation prompts, the score that the paper
reports, so our validation scores are slightly optimistic.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, Key

from specjax import __version__
from specjax.core.errors import SpecjaxError
from specjax.core.settings import Checked, setting
from specjax.models.fingerprint import FrozenModel
from specjax.models.heads.length_classifier import LengthClassifier, PositionKind
from specjax.models.io.classifier import CLASSIFIER, TrainedClassifier, save_classifier
from specjax.models.sharding import Placement, make_mesh
from specjax.training.checkpoints import checksum
from specjax.training.data import from_function
from specjax.training.draft_features import (
    ContinuedPrompt,
    DraftFeatures,
    read_drafts,
    split_by_prompt,
)
from specjax.training.loop import LoopOptions, train
from specjax.training.losses import LossFn

Ids = Sequence[int]
Generate = Callable[[Sequence[Ids]], Sequence[Ids]]  # prompts -> their continuations


@dataclass(frozen=True)
class ClassifierTraining(Checked):
    """Shape and training of the classifier."""

    hidden_size: int = setting(64, at_least=1)
    position: PositionKind = "draft"
    num_steps: int = setting(3000, at_least=1)
    batch_size: int = setting(512, at_least=1)  # tokens
    learning_rate: float = setting(3e-3, above=0)  # falls to zero over the run, by a cosine
    weight_decay: float = setting(1e-4, at_least=0)
    validation_fraction: float = setting(0.15, above=0, below=1)  # of the prompts
    seed: int = 0


def train_classifier(
    target: FrozenModel,
    draft: FrozenModel,
    prompts: Sequence[Ids],
    generate: Generate,
    settings: ClassifierTraining,
    out: Path,
    resume: bool = False,
) -> TrainedClassifier:
    """Trains a classifier on the draft's mistakes in the target's texts, in the run folder `out`.

    `generate` returns the target's greedy continuations of all prompts, with the end token.
    """
    sizes = [model.model.config.vocab_size for model in (target, draft)]
    if sizes[0] != sizes[1]:
        raise SpecjaxError(
            f"the draft has a vocabulary of {sizes[1]} tokens, the target one of {sizes[0]}; give "
            "a draft that shares the target's tokenizer"
        )
    continuations = generate(prompts)
    texts = [ContinuedPrompt(*pair) for pair in zip(prompts, continuations, strict=True)]
    data = read_drafts(texts, draft, settings.position)
    params, scores = fit(data, settings, out, resume)
    trained = TrainedClassifier(
        params=params,
        threshold=scores["threshold"],
        target=target.fingerprint,
        draft=draft.fingerprint,
        scores=scores,
        recipe=asdict(settings) | {"num_prompts": len(prompts), "num_tokens": len(data.is_match)},
        specjax_version=__version__,
        hidden_size=settings.hidden_size,
        position=settings.position,
    )
    if not (out / CLASSIFIER).exists():
        save_classifier(trained, out / CLASSIFIER)
    return trained


def fit(
    data: DraftFeatures,
    settings: ClassifierTraining,
    run_folder: str | Path | None = None,
    resume: bool = False,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Trains on part of the prompts, validates on the rest; returns params and scores."""
    training, validation = split_by_prompt(data, settings.validation_fraction, settings.seed)
    for name, part in (("training", training), ("validation", validation)):
        if len(set(part.is_match.tolist())) == 1:
            kind = "accepted" if part.is_match[0] else "rejected"
            raise SpecjaxError(
                f"all {len(part.is_match)} draft tokens of the {name} prompts would be {kind}, "
                "which teaches nothing; give more or other prompts, or another draft"
            )
    model, labels = LengthClassifier(settings.hidden_size), training.is_match.astype(np.float32)
    decay = optax.cosine_decay_schedule(settings.learning_rate, settings.num_steps)

    def batch_at(step: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng((settings.seed, step))
        chosen = rng.integers(len(labels), size=settings.batch_size)  # with replacement
        return {"features": training.features[chosen], "labels": labels[chosen]}

    trained = train(
        loss_of(model),
        model.initialise(jax.random.key(settings.seed)),
        from_function(batch_at),
        optax.adamw(decay, weight_decay=settings.weight_decay),
        LoopOptions(settings.num_steps, seed=settings.seed),
        run_folder,
        config=asdict(settings) | {"data": checksum((training.features, labels))},
        placement=Placement(make_mesh("data=1"), 1),  # its batches need not spread over devices
        resume=resume,
        title="training disco",
    )
    return trained.params, validate(model, trained.params, validation)


def loss_of(model: LengthClassifier) -> LossFn:
    """Returns the loss for `training.loop`: cross-entropy with the labels."""

    def loss_fn(params: Any, frozen: None, batch: dict[str, Array], key: Key[Array, ""]):
        logits = model.run(params, batch["features"])
        losses = optax.sigmoid_binary_cross_entropy(logits, batch["labels"])
        is_right = (logits >= 0) == (batch["labels"] >= 0.5)
        return jnp.mean(losses), {"accuracy": jnp.mean(is_right.astype(jnp.float32))}

    return loss_fn


def validate(model: LengthClassifier, params: Any, data: DraftFeatures) -> dict[str, Any]:
    """Scores the classifier at its best threshold, and the best static length.

    Both predict acceptance at temperature 0. A static rule predicts that exactly the first
    `static_length` tokens of a draft are accepted; None means unlimited.
    """
    confidence = np.asarray(jax.nn.sigmoid(model.run(params, jnp.asarray(data.features))))
    threshold = best_threshold(confidence, data.is_match)
    static_length = best_static_length(data.depth, data.is_match)
    static = data.depth < (np.inf if static_length is None else static_length)
    return {
        "threshold": threshold,
        "static_length": static_length,
        **scores_of(confidence >= threshold, data.is_match),
        "static_f1": scores_of(static, data.is_match)["f1"],
        "num_tokens": len(data.is_match),
        "acceptance_rate": float(np.mean(data.is_match)),
    }


# ---- Scores of a rule that predicts acceptance (DISCO, table 4) --------------------------------


def scores_of(
    predicted: Bool[np.ndarray, " N"], accepted: Bool[np.ndarray, " N"]
) -> dict[str, float]:
    """Computes precision, recall and F1 of predicted acceptance; 0 where undefined."""
    right = int(np.sum(predicted & accepted))
    num_predicted, num_accepted = int(np.sum(predicted)), int(np.sum(accepted))
    return {
        "precision": right / max(num_predicted, 1),
        "recall": right / max(num_accepted, 1),
        "f1": 2 * right / max(num_predicted + num_accepted, 1),
    }


def best_threshold(confidence: Float[np.ndarray, " N"], accepted: Bool[np.ndarray, " N"]) -> float:
    """Finds the threshold with the highest F1, half-way between two confidences that occur."""
    order = np.argsort(-confidence, kind="stable")
    ordered = confidence[order].astype(np.float64)
    right = np.cumsum(accepted[order])
    f1 = 2 * right / (np.arange(1, len(order) + 1) + right[-1])
    below = np.append(ordered[1:], 0.0)
    f1[ordered == below] = -1.0  # equal confidences stay on one side
    best = int(np.argmax(f1))
    return float((ordered[best] + below[best]) / 2)


def best_static_length(
    depth: Int[np.ndarray, " N"], accepted: Bool[np.ndarray, " N"]
) -> int | None:
    """Finds the static draft length with the highest F1; None if unlimited."""
    lengths = range(1, int(depth.max()) + 2)  # the last one limits no draft
    f1 = [scores_of(depth < length, accepted)["f1"] for length in lengths]
    return None if f1[-1] == max(f1) else lengths[int(np.argmax(f1))]
