"""Chi-square through the real loop: what comes out of drawn drafts has plain decoding's law."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from specjax.decoding import round as round_module
from specjax.decoding.drafter import Params
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.generate import speculative_generate
from specjax.decoding.prompt import Prompt
from specjax.decoding.sampling import Sampling
from specjax.models.cache import KVCache
from specjax.models.target import causal_rows
from tests.decoding.tiny import DrawnChain, DrawnTree, bigram, target

VOCAB = 6
ROWS = 4096
TEXT = (1, 4, 2, 4, 2)
SAMPLING = Sampling(temperature=0.9, top_p=0.95, verification="rejection")


@cache
def law() -> np.ndarray:
    """Exact probability of each continuation of TEXT by three tokens, `[VOCAB] * 3`."""
    model, params = target(VOCAB, layers=1, scale=4.0)

    def next_probs(texts):
        cache = KVCache.create(model.config, *texts.shape)
        rows = causal_rows(texts, jnp.zeros(len(texts), jnp.int32))
        output, _ = model.run(params, rows, cache)
        return np.exp(np.asarray(SAMPLING.filtered(output.logits[:, -1]), np.float64))

    joint, texts = np.ones(1), np.array([TEXT])
    for _ in range(3):
        probs = next_probs(jnp.asarray(texts))
        joint = (joint[:, None] * probs).reshape(-1)
        texts = np.concatenate(
            [np.repeat(texts, VOCAB, axis=0), np.tile(np.arange(VOCAB), len(texts))[:, None]], 1
        )
    return joint / joint.sum()


def p_value(drafter, drafter_params=None, sampling: Sampling = SAMPLING, seed: int = 0) -> float:
    """How likely samples at least this far from the law are, if they follow it."""
    model, params = target(VOCAB, layers=1, scale=4.0)
    prompt = Prompt(jnp.tile(jnp.array([TEXT]), (ROWS, 1)), jnp.full((ROWS,), len(TEXT)))
    out = speculative_generate(
        Params(params, drafter_params),
        prompt,
        jax.random.key(seed),
        target=model,
        drafter=drafter,
        sampling=sampling,
        max_new_tokens=3,
    )
    code = np.asarray(out.tokens) @ np.array([VOCAB**2, VOCAB, 1])
    counts = np.bincount(code, minlength=VOCAB**3).astype(float)
    expected = law() * ROWS
    assert counts[expected == 0].sum() == 0, "a token outside the filters came out"
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    return chisquare(counts, expected).pvalue


DRAWN = {"chain": DrawnChain(), "tree": DrawnTree()}


@pytest.mark.parametrize("name", DRAWN)
def test_drawn_drafts_keep_the_law(name):
    assert p_value(DRAWN[name], bigram(VOCAB)) > 1e-3


@pytest.mark.parametrize("drafter", [Autoregressive(), PromptLookup(num_tokens=2)])
def test_drafts_without_a_distribution_keep_the_law(drafter):
    assert p_value(drafter) > 1e-3


def test_coupled_drafts_keep_the_law_too():
    sampling = Sampling(SAMPLING.temperature, top_p=SAMPLING.top_p)
    assert p_value(DrawnChain(), bigram(VOCAB), sampling) > 1e-3


@pytest.mark.parametrize("lie", ["greedy", "peek"])
def test_lying_drafters_break_it(lie):
    """Greedy drafts that claim a softmax, and draws dropped for being unlikely."""
    assert p_value(DrawnChain(lie=lie), bigram(VOCAB)) < 1e-6


def test_a_verifier_without_residual_breaks_it(monkeypatch):
    right = round_module.verify

    def wrong(tree, logits, draw, root_slot, max_depth):
        verification = right(tree, logits, draw, root_slot, max_depth)
        last = jnp.take_along_axis(verification.path, verification.num_accepted[:, None], axis=1)
        after = jnp.take_along_axis(logits, last[..., None], axis=1)
        scores = draw.perturbed(after, root_slot[:, None], stream=2)
        return type(verification)(
            verification.path, verification.num_accepted, jnp.argmax(scores[:, 0], axis=-1)
        )

    monkeypatch.setattr(round_module, "verify", wrong)
    assert p_value(DrawnChain(max_depth=3), bigram(VOCAB)) < 1e-6
