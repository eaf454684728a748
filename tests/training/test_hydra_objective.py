"""Hydra's loss and gradient against a literal one, and what its slots say against drafting."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.decoding.drafter import Context, Params
from specjax.decoding.drafters.hydra import HydraSettings
from specjax.decoding.generate import start_loop
from specjax.decoding.prompt import from_ids
from specjax.models.cache import KVCache
from specjax.models.heads.eagle import embed
from specjax.models.heads.hydra import HydraHeads
from specjax.models.target import causal_rows
from specjax.training.objectives import hydra
from specjax.training.objectives import slots as slot_values
from specjax.training.objectives.eagle import logit_values
from specjax.training.objectives.hydra import hydra_loss
from specjax.training.objectives.options import HydraObjective
from tests.decoding.hydra_heads import hydra_head
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
    each_alone,
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
SETTINGS = HydraObjective(top_weight=0.5, top_k=3)
PLAIN = HydraObjective()


def heads(has_prefix: bool = True, has_lm_heads: bool = True) -> tuple[HydraHeads, Any]:
    return hydra_head(has_prefix, VOCAB, 1, DEPTHS, has_lm_heads)


@cache
def measure(
    settings: HydraObjective = SETTINGS, has_prefix: bool = True, has_lm_heads: bool = True
):
    loss = hydra_loss(heads(has_prefix, has_lm_heads)[0], TARGET, settings)
    return measure_of(loss)


def read_by_cache(module: HydraHeads, params: Any, clean: np.ndarray, text: int) -> Any:
    """What drafting reads at every slot of a text: the prefix layer, one slot after the other."""
    features = jnp.asarray(clean[text : text + 1])
    cache, found = KVCache.create(module.config.layers, 1, features.shape[1]), []
    for slot in range(len(EXAMPLES[text].tokens)):
        rows = causal_rows(jnp.zeros((1, 1), jnp.int32), cache.length)
        one, cache = module.run(params, FROZEN, rows, features[:, slot : slot + 1], cache)
        cache = cache.advance(jnp.ones_like(cache.length))
        found.append(one[0, 0])
    return jnp.stack(found)


def literal(
    module: HydraHeads, settings: HydraObjective, clean: np.ndarray, params: Any
) -> tuple[Any, dict[str, Any]]:
    """The loss, slot by slot, and the means over the counted slots of each depth."""
    read = [read_by_cache(module, params, clean, text) for text in range(len(EXAMPLES))]
    total = 0.0
    means: dict[str, list[Any]] = {"logit_loss": [], "top_loss": [], "accuracy": []}
    for depth in range(1, DEPTHS + 1):
        found = {name: [] for name in means}
        for text, slot in counted(depth):
            behind = jnp.asarray(EXAMPLES[text].tokens[slot + 1 : slot + 1 + depth])
            [[logits]] = module.logits(
                params,
                TARGET,
                FROZEN,
                depth,
                read[text][None, None, slot],
                embed(FROZEN, behind[None])[None],
            )
            log_probs = logits - jnp.max(logits)
            log_probs = log_probs - jnp.log(jnp.sum(jnp.exp(log_probs)))
            wanted = TABLE @ clean[text, slot + depth]
            law = np.exp(wanted) / np.exp(wanted).sum()
            best = np.argsort(-law)[: settings.top_k]
            found["logit_loss"].append(-jnp.sum(law * log_probs))
            found["top_loss"].append(-jnp.sum(law[best] * log_probs[best]))
            found["accuracy"].append((jnp.argmax(logits) == wanted.argmax()).astype(float))
        for name, values in found.items():
            means[name].append(jnp.mean(jnp.stack(values)))
        total = total + means["logit_loss"][-1] + settings.top_weight * means["top_loss"][-1]
    return total, {name: jnp.stack(values) for name, values in means.items()}


# ---- The definition ------------------------------------------------------------------------------


@pytest.mark.parametrize("has_prefix, has_lm_heads", [(True, True), (False, False)])
def test_loss_and_gradient_are_those_of_the_definition(has_prefix, has_lm_heads):
    """Of packed and padded rows; the definition looks at one slot at a time, as drafting does."""
    module, params = heads(has_prefix, has_lm_heads)
    of_clean = partial(literal, module, SETTINGS, clean_features())
    of_literal = jax.value_and_grad(of_clean, has_aux=True)
    (expected, means), expected_gradient = jax.jit(of_literal)(params)
    (loss, metrics), gradient = measure(SETTINGS, has_prefix, has_lm_heads)(
        params, FROZEN, batch_of(PACKED), KEY
    )
    assert_same((loss, gradient), (expected, expected_gradient))
    np.testing.assert_allclose(metrics["accuracy"], means["accuracy"], atol=1e-6)
    assert metrics["accuracy"].shape == (DEPTHS,)
    assert metrics.keys() == {"logit_loss", "top_loss", "accuracy"}
    for name in ("logit_loss", "top_loss"):
        np.testing.assert_allclose(metrics[name], means[name].mean(), rtol=1e-5)


def test_accuracy_counts_what_the_target_would_say():
    """Heads that repeat the target's next token are right where it says the same one again."""
    module, params = heads(has_prefix=False)
    params = module.initialise(jax.random.key(0), lm_head=FROZEN["lm_head"]["weight"])
    likeliest = (clean_features() @ TABLE.T).argmax(-1)
    expected = [
        np.mean([likeliest[text, slot] == likeliest[text, slot + depth] for text, slot in pairs])
        for depth, pairs in ((depth, counted(depth)) for depth in range(1, DEPTHS + 1))
    ]
    assert 0 < np.mean(expected) < 1
    metrics = measure(PLAIN, has_prefix=False)(params, FROZEN, batch_of(PACKED), KEY)[0][1]
    np.testing.assert_allclose(metrics["accuracy"], expected, atol=1e-6)
    assert metrics.keys() == {"logit_loss", "accuracy"}


def test_a_top_loss_that_cannot_be_is_refused_before_anything_runs():
    with pytest.raises(SpecjaxError, match="bild compares tokens in pairs"):
        hydra_loss(heads()[0], TARGET, HydraObjective(top_loss="bild", top_k=1))


# ---- Drafting ------------------------------------------------------------------------------------


def test_what_is_trained_is_what_drafts(monkeypatch):
    """Logits of every slot and depth in a packed row, and the drafter's behind that much text."""
    module, params = heads()
    trained: list[Any] = []  # by depth, with each text as a row of its own

    def record(settings, logits, wanted_logits):
        trained.append(each_alone(logits))
        return logit_values(settings, logits, wanted_logits)

    monkeypatch.setattr(hydra, "logit_values", record)
    batch = {name: jnp.asarray(values) for name, values in batch_of(PACKED).items()}
    hydra_loss(module, TARGET, PLAIN)(params, FROZEN, batch, KEY)
    own, given = HydraSettings().build(module, TARGET), Params(FROZEN, params)
    for text in (0, 2):  # one that has its row for itself, and one that follows another
        tokens = EXAMPLES[text].tokens.tolist()
        roots = range(1, len(tokens) - 1)  # each the last token of a prompt of its own
        prompts = from_ids([tokens[: root + 1] for root in roots], bucket=16)
        settings: dict[str, Any] = {"target": TARGET, "drafter": own, "max_new_tokens": 4}
        state = start_loop(given, prompts, KEY, **settings)
        context = Context(state.tokens, state.length)
        features, _ = own.catch_up(given, state.drafter, context)
        for row, root in enumerate(roots):
            for depth in range(1, min(DEPTHS, len(tokens) - 1 - root) + 1):
                behind = embed(FROZEN, jnp.asarray([tokens[root : root + depth]]))
                feature = features[row : row + 1]
                said = module.logits(params, TARGET, FROZEN, depth, feature, behind[None])[0, 0]
                found = trained[depth - 1][text, root - 1]
                assert np.abs(found - said).max() <= 1e-5 * np.abs(said).max()


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
    make_loss = partial(hydra_loss, module, TARGET, SETTINGS)
    check_recomputing(measure(), make_loss(recompute=True), params)
    check_chunks(make_loss, params)


def test_a_bfloat16_target_trains_float32_params():
    check_bfloat16_target(measure(), heads()[1])
