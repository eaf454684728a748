"""Chi-square through the real loop: drafts keep plain decoding's distribution; lies are caught."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax.numpy as jnp
import pytest

from specjax.decoding import Proposal, widths
from specjax.decoding.drafters.draft_model import DraftModel
from specjax.decoding.drafters.eagle import Eagle
from specjax.decoding.drafters.eagle2 import Eagle2
from specjax.decoding.drafters.hybrid import Hybrid
from specjax.decoding.drafters.hydra import Hydra
from specjax.decoding.drafters.length_rules import Confidence
from specjax.decoding.drafters.medusa import Medusa
from specjax.decoding.drafters.parallel_spec import ParallelSpec
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.drafters.recycling import Recycling
from specjax.decoding.tree import Verification
from tests.decoding import heads
from tests.decoding.contract import VOCAB, p_value
from tests.decoding.test_draft_model import padded_draft
from tests.decoding.tiny import DrawnChain, DrawnTree, bigram, slow_except, target

CHOICES = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0))


def with_head(kind: type, make: Callable, *given: Any, drafted: tuple = (), **settings: Any):
    head = make(*given, vocab_size=VOCAB, layers=1)
    head, params = heads.narrowed(head, drafted) if drafted else head
    return kind(head, **settings or {"choices": CHOICES}), params


def draft_model(kind: type = DraftModel):
    model, draft = target(VOCAB, layers=1, seed=1, scale=4.0)
    return kind(model, Confidence(0.4), max_length=3), {"draft": draft, "rule": None}


def padded_draft_model(num_tokens: int):
    model, draft = padded_draft(num_tokens, vocab_size=VOCAB, layers=1, scale=4.0)
    return DraftModel(model, "fixed", 2), {"draft": draft, "rule": None}


@dataclass(frozen=True)
class Few(Recycling):
    """For a vocabulary of fewer tokens than there are ranks."""

    num_successors: ClassVar[int] = VOCAB


HONEST = {  # drafters and their params
    "drawn chain": lambda: (DrawnChain(), bigram(VOCAB)),
    "drawn tree": lambda: (DrawnTree(), bigram(VOCAB)),
    "pld": lambda: (PromptLookup(num_tokens=2), None),
    "recycling": lambda: (Few(4), None),
    "hybrid": lambda: (
        Hybrid(PromptLookup(num_tokens=2), DrawnTree()),
        {"copy": None, "head": bigram(VOCAB)},
    ),
    "draft model": draft_model,
    "draft model of fewer tokens": lambda: padded_draft_model(5),
    "draft model of more tokens": lambda: padded_draft_model(8),
    "eagle": lambda: with_head(Eagle, heads.eagle_head),
    "eagle, draft vocabulary": lambda: with_head(
        Eagle, heads.eagle_head, drafted=(4, 1, 2), choices=((0,), (1,), (0, 0))
    ),
    "eagle2": lambda: with_head(Eagle2, heads.eagle_head, top_k=2, depth=2, num_tokens=6),
    "medusa": lambda: with_head(Medusa, heads.medusa_head),
    "hydra": lambda: with_head(Hydra, partial(heads.hydra_head, has_lm_heads=False), True),
    "parallel": lambda: with_head(ParallelSpec, heads.parallel_head),
    "parallel, dynamic": lambda: with_head(
        ParallelSpec, heads.parallel_head, tree="dynamic", top_k=2, num_tokens=6
    ),
}


@pytest.mark.parametrize("name", slow_except(HONEST, "drawn tree"))
def test_drafts_keep_the_distribution(name):
    assert p_value(*HONEST[name]()) > 1e-3


class Lying:
    """Mixed into a drafter: claims that its tokens were drawn from a flat distribution."""

    def propose(self, target, params, state, context, draw):
        (tree, _), state = super().propose(target, params, state, context, draw)
        assert tree.draft_probs is not None
        flat = jnp.full_like(tree.draft_probs, 1 / tree.draft_probs.shape[-1])
        return Proposal(replace(tree, draft_probs=flat)), state


class Peeking(DraftModel):
    """Drops tokens for what they are."""

    def propose(self, target, params, state, context, draw):
        (tree, _), state = super().propose(target, params, state, context, draw)
        assert tree.draft_probs is not None
        drafted = tree.tokens[:, 1:, None]
        own = jnp.take_along_axis(tree.draft_probs[:, :-1], drafted, axis=2)[..., 0]
        kept = jnp.cumprod(own >= 0.4, axis=1).astype(bool)
        valid = tree.valid & jnp.pad(kept, ((0, 0), (1, 0)), constant_values=True)
        return Proposal(replace(tree, valid=valid)), state


def lying(kind: type) -> type:
    return type("LyingDrafter", (Lying, kind), {})


LIARS = {
    "greedy drafts that claim a softmax": lambda: (DrawnChain(lie="greedy"), bigram(VOCAB)),
    "draws dropped for being unlikely": lambda: (DrawnChain(lie="peek"), bigram(VOCAB)),
    "eagle": lambda: with_head(lying(Eagle), heads.eagle_head),
    "medusa": lambda: with_head(lying(Medusa), heads.medusa_head),
    "draft model": lambda: draft_model(lying(DraftModel)),
    "peeking draft model": lambda: draft_model(Peeking),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LIARS)
def test_lies_about_what_was_drawn_are_caught(name):
    assert p_value(*LIARS[name]()) < 1e-6


def test_a_verifier_without_residual_is_caught(monkeypatch):
    right = widths.verify

    def wrong(tree, logits, draw, root_slot, max_depth):
        verification = right(tree, logits, draw, root_slot, max_depth)
        last = jnp.take_along_axis(verification.path, verification.num_accepted[:, None], axis=1)
        after = jnp.take_along_axis(logits, last[..., None], axis=1)
        scores = draw.filtered(after) + draw.noise(root_slot[:, None], VOCAB, stream=2)
        bonus = jnp.argmax(scores[:, 0], axis=-1)
        return Verification(verification.path, verification.num_accepted, bonus)

    monkeypatch.setattr(widths, "verify", wrong)
    assert p_value(DrawnChain(max_depth=3), bigram(VOCAB)) < 1e-6
