"""Medusa's loss and gradient against a literal one; masks, recomputation and precision."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.errors import SpecjaxError
from specjax.models.heads.medusa import MedusaHeads
from specjax.training.objectives import slots as slot_values
from specjax.training.objectives.medusa import medusa_loss
from specjax.training.objectives.options import MedusaObjective
from tests.decoding.medusa_heads import medusa_head
from tests.models.test_eagle_head import gradients_differ_by
from tests.training.literal import (
    EXAMPLES,
    FROZEN,
    KEY,
    PACKED,
    TARGET,
    VOCAB,
    assert_same,
    batch_of,
    clean_features,
)

DEPTHS = 3
TABLE = np.asarray(FROZEN["lm_head"]["weight"])
# Weights that are not the defaults, so that a weight that is not read shows.
SETTINGS = MedusaObjective(head_decay=0.7, top_weight=0.5, top_k=3)
PLAIN = MedusaObjective()


def heads(has_lm_heads: bool = True) -> tuple[MedusaHeads, Any]:
    return medusa_head(VOCAB, 1, DEPTHS, has_lm_heads)


@cache
def measure(settings: MedusaObjective = SETTINGS, has_lm_heads: bool = True):
    loss = medusa_loss(heads(has_lm_heads)[0], TARGET, settings)
    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def counted(depth: int) -> list[tuple[int, int]]:
    """Texts and slots whose token `1 + depth` later is an answer of the text."""
    return [
        (text, slot)
        for text, example in enumerate(EXAMPLES)
        for slot in range(len(example.tokens) - 1 - depth)
        if example.is_answer[slot + 1 + depth]
    ]


def literal(
    settings: MedusaObjective, features: np.ndarray, params: Any
) -> tuple[Any, dict[str, Any]]:
    """The loss, slot by slot, and the means over the counted slots of each depth."""
    total = 0.0
    means: dict[str, list[Any]] = {"token_loss": [], "top_loss": [], "accuracy": []}
    for depth in range(1, DEPTHS + 1):
        found = {name: [] for name in means}
        block = params[f"blocks_{depth - 1}"]
        own = params.get(f"lm_heads_{depth - 1}", {"weight": TABLE})["weight"]
        for text, slot in counted(depth):
            x = features[text, slot]
            for _ in range(2):
                inner = block["weight"] @ x + block["bias"]
                x = x + inner / (1 + jnp.exp(-inner))
            logits, label = own @ x, EXAMPLES[text].tokens[slot + 1 + depth]
            log_probs = logits - jnp.log(jnp.sum(jnp.exp(logits)))
            wanted = TABLE @ features[text, slot + depth]
            law = np.exp(wanted) / np.exp(wanted).sum()
            best = np.argsort(-law)[: settings.top_k]
            found["token_loss"].append(-log_probs[label])
            found["top_loss"].append(-jnp.sum(law[best] * log_probs[best]))
            found["accuracy"].append((jnp.argmax(logits) == label).astype(float))
        for name, values in found.items():
            means[name].append(jnp.mean(jnp.stack(values)))
        both = means["token_loss"][-1] + settings.top_weight * means["top_loss"][-1]
        total = total + settings.head_decay**depth * both
    return total, {name: jnp.stack(values) for name, values in means.items()}


# ---- The definition ------------------------------------------------------------------------------


@pytest.mark.parametrize("has_lm_heads", [True, False])
def test_loss_and_gradient_are_those_of_the_definition(has_lm_heads):
    """Of packed and padded rows; the definition looks at one slot at a time."""
    params = heads(has_lm_heads)[1]
    of_literal = jax.value_and_grad(partial(literal, SETTINGS, clean_features()), has_aux=True)
    (expected, means), expected_gradient = jax.jit(of_literal)(params)
    (loss, metrics), gradient = measure(SETTINGS, has_lm_heads)(
        params, FROZEN, batch_of(PACKED), KEY
    )
    assert_same((loss, gradient), (expected, expected_gradient))
    np.testing.assert_allclose(metrics["accuracy"], means["accuracy"], atol=1e-6)
    assert metrics["accuracy"].shape == (DEPTHS,)
    assert metrics.keys() == {"token_loss", "top_loss", "accuracy"}
    for name in ("token_loss", "top_loss"):
        np.testing.assert_allclose(metrics[name], means[name].mean(), rtol=1e-5)


def test_accuracy_counts_the_tokens_of_the_text():
    """Each head is made to say one token, which some of its texts have there."""
    params = jax.tree.map(jnp.zeros_like, heads()[1])
    features = clean_features()
    for depth in range(1, DEPTHS + 1):
        text, slot = counted(depth)[0]
        table = np.zeros((VOCAB, 32), np.float32)
        label = EXAMPLES[text].tokens[slot + 1 + depth]
        table[label] = features[text, slot]
        params[f"lm_heads_{depth - 1}"] = {"weight": jnp.asarray(table)}
    loss, metrics = measure(PLAIN)(params, FROZEN, batch_of(PACKED), KEY)[0]
    expected, means = literal(PLAIN, features, params)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert metrics.keys() == {"token_loss", "accuracy"}
    assert (np.asarray(means["accuracy"]) > 0).all()
    np.testing.assert_allclose(metrics["accuracy"], means["accuracy"], atol=1e-6)


def test_the_default_weight_is_that_of_the_released_code():
    assert PLAIN.head_decay == 0.8 and PLAIN.top_weight == 0


def test_a_top_loss_that_cannot_be_is_refused_before_anything_runs():
    with pytest.raises(SpecjaxError, match="bild compares tokens in pairs"):
        medusa_loss(heads()[0], TARGET, MedusaObjective(top_loss="bild", top_k=1))


# ---- Masks ---------------------------------------------------------------------------------------


def test_what_stands_in_padding_changes_nothing():
    batch = batch_of(PACKED)
    padding = batch["segments"] == 0
    filled = batch | {"tokens": np.where(padding, 7, batch["tokens"])}
    filled["is_answer"] = batch["is_answer"] | padding
    filled["positions"] = np.where(padding, 90, batch["positions"])
    params = heads()[1]
    (loss, _), gradient = measure()(params, FROZEN, batch, KEY)
    (again, _), same = measure()(params, FROZEN, filled, KEY)
    assert_same((again, same), (loss, gradient), tolerance=1e-6)


def test_a_batch_in_which_no_slot_counts_gives_nothing():
    batch = batch_of(((0,), ()))
    batch["is_answer"][:] = batch["positions"] < 2
    for leaf in jax.tree.leaves(measure()(heads()[1], FROZEN, batch, KEY)):
        np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


@pytest.mark.parametrize("shift", [-1, 1])
def test_slots_counted_elsewhere_would_be_caught(shift):
    batch = batch_of(PACKED)
    (loss, _), gradient = measure()(heads()[1], FROZEN, batch, KEY)
    batch["is_answer"] = np.roll(batch["is_answer"], shift, axis=1)
    (moved, _), other = measure()(heads()[1], FROZEN, batch, KEY)
    assert abs(loss - moved) > 1e-3 * loss
    assert gradients_differ_by(other, gradient) > 1e-2


# ---- Recomputation and precision -----------------------------------------------------------------


def test_recomputing_changes_nothing_and_never_has_all_logits(monkeypatch):
    """12 slots a row in chunks of at most 5, so of 4; without, their logits are there at once."""
    monkeypatch.setattr(slot_values, "LOGIT_SLOTS", 5)
    module, params = heads()
    arguments = (params, FROZEN, batch_of(PACKED), KEY)
    expected = measure()(*arguments)
    texts = {}
    for recompute in (False, True):
        loss = medusa_loss(module, TARGET, SETTINGS, recompute)
        program = jax.value_and_grad(loss, has_aux=True)
        texts[recompute] = str(jax.make_jaxpr(program)(*arguments))
    (again, metrics), gradient = jax.jit(program)(*arguments)
    assert_same((again, gradient), (expected[0][0], expected[1]), tolerance=1e-6)
    for name, value in metrics.items():
        np.testing.assert_allclose(value, expected[0][1][name], rtol=1e-6)
    assert f"f32[2,12,{VOCAB}]" in texts[False] and f"f32[2,12,{VOCAB}]" not in texts[True]
    assert f"f32[2,4,{VOCAB}]" in texts[True]
    assert f",4,{VOCAB}]" not in texts[True].replace(f"f32[2,4,{VOCAB}]", "")  # of all chunks


def test_a_bfloat16_target_trains_float32_params():
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), FROZEN)
    batch, params = batch_of(PACKED), heads()[1]
    (loss, metrics), gradient = measure()(params, narrow, batch, KEY)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((loss, metrics, gradient)))
    (wide, _), wide_gradient = measure()(params, FROZEN, batch, KEY)
    np.testing.assert_allclose(loss, wide, rtol=0.05)
    for own, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(wide_gradient), strict=True):
        assert np.vdot(own, other) > 0.9 * np.linalg.norm(own) * np.linalg.norm(other)
