"""Chi-square through the real loop: what comes out of drawn drafts has plain decoding's law."""

import jax.numpy as jnp
import pytest

from specjax.decoding import widths
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.tree import Verification
from tests.decoding.contract import VOCAB, p_value
from tests.decoding.tiny import DrawnChain, DrawnTree, bigram, slow_except


@pytest.mark.parametrize("drafter", slow_except((DrawnChain(), DrawnTree()), DrawnTree()))
def test_drawn_drafts_keep_the_distribution(drafter):
    assert p_value(drafter, bigram(VOCAB)) > 1e-3


@pytest.mark.slow
def test_drafts_without_a_distribution_keep_it_too():
    assert p_value(PromptLookup(num_tokens=2)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("lie", ["greedy", "peek"])
def test_lying_drafters_are_caught(lie):
    """Greedy drafts that claim a softmax, and draws dropped for being unlikely."""
    assert p_value(DrawnChain(lie=lie), bigram(VOCAB)) < 1e-6


def test_a_verifier_without_residual_is_caught(monkeypatch):
    right = widths.verify

    def wrong(tree, logits, draw, root_slot, max_depth):
        verification = right(tree, logits, draw, root_slot, max_depth)
        last = jnp.take_along_axis(verification.path, verification.num_accepted[:, None], axis=1)
        after = jnp.take_along_axis(logits, last[..., None], axis=1)
        scores = draw.perturbed(after, root_slot[:, None], stream=2)
        bonus = jnp.argmax(scores[:, 0], axis=-1)
        return Verification(verification.path, verification.num_accepted, bonus)

    monkeypatch.setattr(widths, "verify", wrong)
    assert p_value(DrawnChain(max_depth=3), bigram(VOCAB)) < 1e-6
