"""EAGLE's and HASS's losses by their definitions: text by text and slot by slot, by drafting."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.drafter import Params
from specjax.training.examples import Example
from specjax.training.objectives.eagle import Slots, prepare
from specjax.training.objectives.options import EagleObjective, HassObjective
from tests.decoding import heads, tiny
from tests.models.test_eagle_head import Texts, drafts, gradients_differ_by

LENGTH, VOCAB, WIDTH = 12, 40, 32
TARGET, RANDOM = tiny.target(VOCAB, layers=1)
HEAD, PARAMS = heads.head(VOCAB, layers=1)
# Mostly one of two tokens is the likeliest, so that a random head is right now and then.
TABLE = RANDOM["lm_head"]["weight"]
FROZEN = RANDOM | {"lm_head": {"weight": TABLE.at[0].multiply(5).at[1].set(-5 * TABLE[0])}}
KEY = jax.random.key(11)
NOISE = 0.005  # a quarter to each side in a text of 10 tokens: about as wide as features differ


def _example(answers: Sequence[int], size: int, seed: int) -> Example:
    tokens = np.random.default_rng(seed).integers(0, VOCAB, size).astype(np.int32)
    return Example(tokens, np.isin(np.arange(size), answers))


# Two answers of which one ends the text; one from the first counted token on; a single token.
EXAMPLES = (
    _example([3, 4, 5, 8], 9, seed=0),
    _example([0, 1, 2, 3, 4], 6, seed=1),
    _example([3], 4, seed=2),
)
PACKED = ((0,), (1, 2))  # the texts of each row
ALONE = ((0,), (1,), (2,))


def batch_of(rows: Sequence[Sequence[int]], length: int = LENGTH) -> dict[str, np.ndarray]:
    """A batch whose rows hold these of `EXAMPLES`, and then padding."""
    kinds = {"tokens": np.int32, "is_answer": bool, "segments": np.int32, "positions": np.int32}
    batch = {name: np.zeros((len(rows), length), kind) for name, kind in kinds.items()}
    for row, texts in enumerate(rows):
        first = 0
        for segment, text in enumerate(texts, start=1):
            example = EXAMPLES[text]
            end = first + len(example.tokens)
            batch["tokens"][row, first:end] = example.tokens
            batch["is_answer"][row, first:end] = example.is_answer
            batch["segments"][row, first:end] = segment
            batch["positions"][row, first:end] = np.arange(end - first)
            first = end
    return batch


def counted(depth: int = 1) -> list[tuple[int, int]]:
    """Texts and slots whose token `1 + depth` later is an answer of the text."""
    return [
        (text, slot)
        for text, example in enumerate(EXAMPLES)
        for slot in range(len(example.tokens) - 1 - depth)
        if example.is_answer[slot + 1 + depth]
    ]


def each_alone(values: Any) -> np.ndarray:
    """Texts of a batch of `PACKED` as rows `[3, T, ...]` of their own, then zeros."""
    values = np.asarray(values)
    found = np.zeros((len(EXAMPLES), *values.shape[1:]), values.dtype)
    for row, texts in enumerate(PACKED):
        first = 0
        for text in texts:
            size = len(EXAMPLES[text].tokens)
            found[text, :size] = values[row, first : first + size]
            first += size
    return found


@cache
def slots_of(noise: float) -> Slots:
    """What a head sees of a batch of `PACKED`, its noise drawn with `KEY`."""
    settings = EagleObjective(noise=noise)
    see = jax.jit(lambda batch: prepare(PARAMS, TARGET, FROZEN, batch, KEY, settings)[1])
    return see(batch_of(PACKED))


class Definition(NamedTuple):
    """What a loss is, and what it is made of by step of the draft."""

    loss: Any
    gradient: Any
    feature_loss: Any  # [N]
    logit_loss: Any  # [N]
    top_loss: Any  # [N]
    accuracy: Any  # [N]


@cache
def clean_features() -> np.ndarray:
    """The target's own feature of every token of each text, from a plain pass; then zeros."""
    batch = batch_of(ALONE)
    features = heads.features_of(Params(FROZEN, None), jnp.asarray(batch["tokens"]), TARGET)
    return np.where(batch["segments"][..., None] > 0, features, 0)


def definition(settings: EagleObjective, features: Any, predict: Any = drafts) -> Definition:
    """The loss over `EXAMPLES`, each alone, and its gradient.

    Args:
        settings: EAGLE's, or HASS's with top-k.
        features: what the head reads, noise included; `[3, T, D]`, as `each_alone` makes them.
        predict: what is said at each slot as the n-th token of a draft; for mutants.
    """
    measure = _measure(settings, predict)
    (loss, parts), gradient = measure(PARAMS, jnp.asarray(features), clean_features())
    return Definition(loss, gradient, *parts)


@cache
def _measure(settings: EagleObjective, predict: Any):
    return jax.jit(jax.value_and_grad(partial(_loss, settings, predict), has_aux=True))


def _loss(settings: EagleObjective, predict: Any, params: Any, features: Any, clean: Any):
    hass = settings if isinstance(settings, HassObjective) else HassObjective(align_steps=1)
    top_weight = hass.top_weight if hass is settings else 0.0
    alone = batch_of(ALONE)
    behind = np.pad(alone["tokens"][:, 1:], ((0, 0), (0, 1)))
    places = (jnp.asarray(alone[name]) for name in ("positions", "segments"))
    texts = Texts(jnp.asarray(behind), features, *places)
    predictions = predict(HEAD, params, FROZEN, texts, hass.align_steps)
    texts_of, slots = np.array(counted()).T
    wanted = clean[texts_of, slots + 1]
    table = FROZEN["lm_head"]["weight"]
    law = jax.nn.softmax(wanted @ table.T)
    total, parts = 0.0, []
    for step, predicted in enumerate(predictions[:, texts_of, slots]):
        distance = jnp.abs(predicted - wanted)
        feature = jnp.mean(jnp.where(distance < 1, distance**2 / 2, distance - 0.5))
        log_own = jax.nn.log_softmax(predicted @ table.T)
        logit = jnp.mean(jnp.sum(-law * log_own, axis=-1))
        likeliest = jnp.argsort(-law, axis=-1)[:, : hass.top_k]
        of_likeliest = (jnp.take_along_axis(each, likeliest, 1) for each in (law, log_own))
        distilled = jnp.mean(-jnp.sum(jnp.multiply(*of_likeliest), axis=-1))
        is_right = jnp.argmax(log_own, axis=-1) == jnp.argmax(law, axis=-1)
        parts.append((feature, logit, distilled, jnp.mean(is_right)))
        total = total + hass.step_decay**step * (
            settings.feature_weight * feature
            + settings.logit_weight * logit
            + top_weight * distilled
        )
    return total, tuple(jnp.stack(part) for part in zip(*parts, strict=True))


def assert_same(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Two pairs of loss and gradient, each leaf of it against its largest entry."""
    np.testing.assert_allclose(found[0], expected[0], rtol=tolerance)
    assert gradients_differ_by(found[1], expected[1]) <= tolerance
