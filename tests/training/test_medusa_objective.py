"""Medusa's loss and gradient against a literal one; masks, recomputation and precision."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.models.heads.medusa import MedusaHeads
from specjax.training.objectives import slots as slot_values
from specjax.training.objectives.medusa import medusa_loss
from specjax.training.objectives.options import MedusaObjective
from tests.decoding.medusa_heads import medusa_head
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
    counted,
)
from tests.training.objective_checks import (
    check_bfloat16_target,
    check_chunks,
    check_no_slot,
    check_other_slots,
    check_padding,
    check_recomputing,
    measure_of,
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
    return measure_of(loss)


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
    check_padding(measure(), heads()[1])


def test_a_batch_in_which_no_slot_counts_gives_nothing():
    check_no_slot(measure(), heads()[1])


@pytest.mark.parametrize("shift", [-1, 1])
def test_slots_counted_elsewhere_would_be_caught(shift):
    check_other_slots(measure(), heads()[1], shift)


# ---- Recomputation and precision -----------------------------------------------------------------


def test_recomputing_changes_nothing_and_never_has_all_logits(monkeypatch):
    """12 slots a row in chunks of at most 5, so of 4."""
    monkeypatch.setattr(slot_values, "LOGIT_SLOTS", 5)
    module, params = heads()
    make_loss = partial(medusa_loss, module, TARGET, SETTINGS)
    check_recomputing(measure(), make_loss(recompute=True), params)
    check_chunks(make_loss, params)


def test_a_bfloat16_target_trains_float32_params():
    check_bfloat16_target(measure(), heads()[1])
