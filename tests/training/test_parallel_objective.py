"""ParallelSpec's losses and gradients by their definitions: text by text and group by group."""

import math
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.decoding.drafter import Params
from specjax.models.config import TransformerConfig
from specjax.models.heads.parallel import ParallelConfig, ParallelHead
from specjax.models.transformer import Transformer
from specjax.training.objectives import slots as slot_values
from specjax.training.objectives.options import ParallelEagleObjective, ParallelMedusaObjective
from specjax.training.objectives.parallel_spec import parallel_eagle_loss, parallel_medusa_loss
from tests.decoding import heads
from tests.decoding.parallel_heads import MASKS, features_for, parallel_head
from tests.models.test_eagle_head import Texts
from tests.models.test_parallel_head import drafts
from tests.training.literal import (
    ALONE,
    FROZEN,
    KEY,
    NOISE,
    PACKED,
    TARGET,
    VOCAB,
    assert_same,
    batch_of,
    counted,
    each_alone,
    slots_of,
)
from tests.training.objective_checks import check_bfloat16_target, check_recomputing, measure_of


class Kind(NamedTuple):
    """A head and its objective. Nothing is a default, so that a setting that is not read shows."""

    reads_features: bool
    settings: Any

    @property
    def head(self) -> Any:
        return parallel_head(self.reads_features, VOCAB, layers=1)[0]

    @property
    def params(self) -> Any:
        return parallel_head(self.reads_features, VOCAB, layers=1)[1]

    @property
    def is_eagle(self) -> bool:
        return isinstance(self.settings, ParallelEagleObjective)

    def loss(self, recompute: bool = False):
        make = parallel_eagle_loss if self.is_eagle else parallel_medusa_loss
        return make(self.head, TARGET, self.settings, recompute)

    def batch(self, rows: Any = PACKED) -> dict[str, np.ndarray]:
        """Of two tokens only where tokens are learned, so that a random head is right sometimes."""
        batch = batch_of(rows)
        return batch if self.is_eagle else batch | {"tokens": batch["tokens"] % 2}


EAGLE = ParallelEagleObjective(
    feature_weight=0.7, logit_weight=0.3, noise=NOISE, top_weight=0.8, top_k=4
)
MEDUSA = ParallelMedusaObjective(head_decay=0.6, top_weight=0.8, top_k=4)
KINDS = {
    "eagle": Kind(True, EAGLE),
    "medusa": Kind(False, MEDUSA),
    "medusa with features": Kind(True, ParallelMedusaObjective(head_decay=0.6)),
}
every_kind = pytest.mark.parametrize("name", KINDS)


@cache
def measure(name: str):
    return measure_of(KINDS[name].loss())


@cache
def measured(name: str):
    """Loss, gradient and metrics of the packed texts."""
    kind = KINDS[name]
    (loss, metrics), gradient = measure(name)(kind.params, FROZEN, kind.batch(), KEY)
    return loss, gradient, metrics


# ---- The definition ------------------------------------------------------------------------------


def literal(kind: Kind):
    """Loss, its parts by depth and its gradient, of each text alone and each group by itself."""
    alone = kind.batch(ALONE)
    tokens = jnp.asarray(alone["tokens"])
    clean = heads.features_of(Params(FROZEN, None), tokens, TARGET)
    features = jnp.asarray(each_alone(slots_of(NOISE).features)) if kind.is_eagle else clean
    behind = jnp.asarray(np.pad(alone["tokens"][:, 1:], ((0, 0), (0, 1))))
    places = (jnp.asarray(alone[name]) for name in ("positions", "segments"))
    texts = Texts(behind, features_for(kind.head, features), *places)
    settings = kind.settings

    def total(params):
        of_depths, loss = [], 0.0
        for depth, predicted in enumerate(drafts(kind.head, params, FROZEN, texts), start=1):
            own = [
                one_token(kind, tokens, clean, predicted, depth, *group) for group in counted(depth)
            ]
            parts = {name: sum(each[name] for each in own) / len(own) for name in own[0]}
            weights = {"feature_loss": 0.7, "logit_loss": 0.3}
            decay = 1.0
            if not kind.is_eagle:
                weights, decay = {"token_loss": 1.0}, settings.head_decay ** (depth - 1)
            weights["top_loss"] = settings.top_weight
            loss += decay * sum(weights[name] * parts[name] for name in weights)
            of_depths.append(parts)
        return loss, of_depths

    (loss, of_depths), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(kind.params)
    return loss, gradient, of_depths


def one_token(kind: Kind, tokens, clean, predicted, depth: int, text: int, slot: int):
    """What the prediction of one token of one group costs."""
    table = FROZEN["lm_head"]["weight"]
    log_own = jax.nn.log_softmax(table @ predicted[text, slot])
    wanted, token = clean[text, slot + depth], tokens[text, slot + 1 + depth]
    law = jax.nn.softmax(table @ wanted)
    likeliest = jnp.argsort(-law)[: kind.settings.top_k]
    distance = jnp.abs(predicted[text, slot] - wanted)
    return {
        "feature_loss": jnp.mean(jnp.where(distance < 1, distance**2 / 2, distance - 0.5)),
        "logit_loss": -jnp.sum(law * log_own),
        "token_loss": -log_own[token],
        "top_loss": -jnp.sum(law[likeliest] * log_own[likeliest]),
        "accuracy": jnp.argmax(log_own) == (jnp.argmax(law) if kind.is_eagle else token),
    }


@every_kind
def test_loss_and_gradient_are_those_of_each_group_alone(name):
    kind = KINDS[name]
    loss, gradient, metrics = measured(name)
    expected, expected_gradient, of_depths = literal(kind)
    assert_same((loss, gradient), (expected, expected_gradient), tolerance=2e-5)
    parts = ["feature_loss", "logit_loss"] if kind.is_eagle else ["token_loss"]
    parts += ["top_loss"] if kind.settings.top_weight > 0 else []
    assert sorted(metrics) == sorted(["accuracy", *parts])
    for part in parts:
        values = [each[part] for each in of_depths]
        assert np.abs(np.diff(values)).min() > 1e-3  # each depth's is its own
        np.testing.assert_allclose(metrics[part], np.mean(values), rtol=1e-5)
    accuracy = [each["accuracy"] for each in of_depths]
    assert len(set(map(float, accuracy))) > 1
    np.testing.assert_allclose(metrics["accuracy"], accuracy, rtol=1e-6)


def test_the_target_runs_only_where_its_features_are_read():
    kind = Kind(False, ParallelMedusaObjective())
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, FROZEN)
    broken |= {name: FROZEN[name] for name in ("embed_tokens", "lm_head")}
    loss, metrics = jax.jit(kind.loss())(kind.params, broken, kind.batch(), KEY)
    assert np.isfinite(loss) and metrics["accuracy"].shape == (MASKS + 1,)


def test_a_bfloat16_target_trains_float32_params():
    kind = KINDS["medusa"]
    check_bfloat16_target(measure("medusa"), kind.params, kind.batch())


def test_a_top_loss_that_cannot_be_is_refused_before_training():
    settings = {"top_loss": "bild", "top_k": 1}
    with pytest.raises(SpecjaxError, match="bild compares tokens in pairs"):
        parallel_eagle_loss(KINDS["eagle"].head, TARGET, ParallelEagleObjective(**settings))
    with pytest.raises(SpecjaxError, match="bild compares tokens in pairs"):
        parallel_medusa_loss(KINDS["medusa"].head, TARGET, ParallelMedusaObjective(**settings))


# ---- Recomputation -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eagle", "medusa"])
def test_recomputing_changes_nothing(name, monkeypatch):
    """12 slots a row are no multiple of a chunk."""
    monkeypatch.setattr(slot_values, "LOGIT_SLOTS", 5)
    kind = KINDS[name]
    check_recomputing(measure(name), kind.loss(recompute=True), kind.params, kind.batch(), 1e-5)


@pytest.mark.parametrize("name", ["eagle", "medusa"])
def test_recomputing_keeps_keys_and_values_of_each_depth_only(name):
    """No `[T, T]` of attention and no `[T, V]` of logits, which are the most by far."""
    length, vocabulary, rows = 128, 1024, 2
    config = TransformerConfig(vocabulary, 32, 48, 1, 4, 2, 8)

    def kept(num_masks: int, recompute: bool) -> int:
        """Bytes kept for the gradients once the loss is known; nothing is run."""
        target = Transformer(config)
        head = ParallelHead(ParallelConfig.for_target(config, num_masks, name == "eagle"))
        make = parallel_eagle_loss if name == "eagle" else parallel_medusa_loss
        loss: Any = make(head, target, KINDS[name].settings, recompute)
        ints, bools = (jax.ShapeDtypeStruct((rows, length), kind) for kind in (jnp.int32, bool))
        arguments = (
            jax.eval_shape(lambda: head.initialise(jax.random.key(0))),
            jax.eval_shape(lambda: target.initialise(jax.random.key(0))),
            {"tokens": ints, "segments": ints, "positions": ints, "is_answer": bools},
            jax.eval_shape(lambda: jax.random.key(0)),
        )

        def backward(params, *others):
            return jax.vjp(lambda params: loss(params, *others)[0], params)[1]

        arrays = jax.tree.leaves(jax.eval_shape(backward, *arguments))
        return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)

    again, whole = (np.diff([kept(masks, each) for masks in (1, 2, 3)]) for each in (True, False))
    keys_and_values = 4 * rows * length * 2 * 2 * 8
    assert again[0] == again[1] <= keys_and_values + 4 * 32 + 100  # a mask, and a few scalars
    assert whole.min() > 4 * rows * length * (4 * length + vocabulary)
