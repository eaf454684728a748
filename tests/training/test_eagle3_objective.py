"""EAGLE-3's loss over a draft vocabulary; see `test_objectives.py` for the loss over all tokens."""

import jax
import jax.numpy as jnp
import numpy as np

from specjax.training.data import slot_mask
from specjax.training.objectives.base import target_features
from specjax.training.objectives.eagle3 import Eagle3Training
from tests.decoding import heads
from tests.training.cases import CASES, FROZEN, KEY, TARGET, VOCAB

DRAFTED = tuple(range(1, VOCAB, 3))


def test_the_targets_distribution_is_limited_to_the_draft_vocabulary():
    """And slots whose likeliest token is outside teach nothing."""
    head, params = heads.eagle3_head(VOCAB, 1, DRAFTED)
    fixed = {"draft_tokens": params["draft_tokens"]}
    learned = {name: leaf for name, leaf in params.items() if name not in fixed}
    training = Eagle3Training(draft_vocab=len(DRAFTED), test_steps=1)
    batch = jax.tree.map(jnp.asarray, CASES["eagle3"].batch)
    loss = training.loss(head, TARGET)
    found, metrics = loss(params, FROZEN, batch, KEY)
    whole, all_params = heads.eagle3_head(VOCAB, 1)  # with all tokens, and this LM head
    table = jnp.zeros((VOCAB, TARGET.config.hidden_size))
    table = table.at[jnp.array(DRAFTED)].set(params["lm_head"]["weight"])
    all_params = learned | {"lm_head": {"weight": table}}
    recorded = {}

    def record(self, logits, target_logits):
        recorded["logits"] = logits
        return {}

    class Recording(Eagle3Training):
        top_values = record

    with jax.disable_jit():
        Recording(draft_vocab=0, test_steps=1).loss(whole, TARGET)(all_params, FROZEN, batch, KEY)
    places = (batch[name] for name in ("tokens", "positions", "segments"))
    wanted = TARGET.logits(FROZEN, target_features(TARGET, FROZEN, *places))
    own = np.asarray(recorded["logits"])[..., list(DRAFTED)]  # at the slot that is predicted
    law = jax.nn.softmax(wanted[..., list(DRAFTED)], axis=-1)
    losses = -np.sum(law * jax.nn.log_softmax(own, axis=-1), axis=-1)
    best = np.argmax(wanted, axis=-1)
    counts = np.roll(slot_mask(batch["is_answer"], batch["segments"], ahead=2), 1, axis=1)
    teaches = counts & np.isin(best, DRAFTED)
    assert 0 < teaches.sum() < counts.sum()
    np.testing.assert_allclose(found, losses[teaches].sum() / counts.sum(), rtol=1e-5)
    is_right = np.array(DRAFTED)[np.argmax(own, axis=-1)] == best
    np.testing.assert_allclose(metrics["accuracy"], [is_right[counts].mean()], rtol=1e-5)


def test_the_loss_has_a_gradient_for_what_is_learned():
    head, params = heads.eagle3_head(VOCAB, 1, DRAFTED)
    fixed = {"draft_tokens": params["draft_tokens"]}
    own = {name: leaf for name, leaf in params.items() if name not in fixed}
    loss = Eagle3Training(test_steps=2).loss(head, TARGET)
    batch = jax.tree.map(jnp.asarray, CASES["eagle3"].batch)
    slope = jax.jit(jax.grad(lambda own: loss(own | fixed, FROZEN, batch, KEY)[0]))(own)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(slope))
