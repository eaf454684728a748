"""EAGLE-2's trees against their definition, with ties, noise and filters; and its settings."""

from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.decoding.drafters._trees import CUT_SETBACK

from specjax.core.errors import SpecjaxError
from specjax.decoding.drafter import Params
from specjax.decoding.drafters.eagle2 import Eagle2, Eagle2Settings
from specjax.decoding.sampling import Draw, Sampling
from specjax.decoding.tree import DraftTree
from specjax.models.transformer import Transformer
from tests.decoding.heads import EAGLE2, Literal, first_trees, head, params_of
from tests.decoding.test_distribution import VOCAB, p_value
from tests.decoding.test_eagle import found_paths
from tests.decoding.test_tree import assert_well_formed
from tests.decoding.test_with_head import later_trees
from tests.decoding.tiny import prompt, target

SMALL = Eagle2Settings(top_k=3, depth=4, num_tokens=14)
BATCH = 3
KEY = jax.random.key(2)


def drafter(settings: Eagle2Settings = SMALL, vocab_size: int = 40, layers: int = 2) -> Eagle2:
    return Eagle2(head(vocab_size, layers)[0], target(vocab_size, layers)[0], settings)


@cache
def proposed(own: Eagle2, sampling: Sampling, heads: str) -> DraftTree:
    return first_trees(own, sampling, changed(heads), prompt(BATCH), KEY)


def changed(heads: str) -> Params:
    """The params with an LM head that makes ties: of all tokens, of most, of parent and child."""
    params = params_of()
    table = params.target["lm_head"]["weight"]
    table = {
        "random": table * 4,
        "all alike": table * 0,
        "mostly alike": table.at[5:].set(0),
        "certain": table * 1e4,
    }[heads]
    return Params({**params.target, "lm_head": {"weight": table}}, params.drafter)


def by_definition(
    own: Eagle2, sampling: Sampling, literal: Literal, key: jax.Array
) -> list[tuple[int, ...]]:
    """The paths of the nodes that are kept, in the order in which they were drafted."""
    settings, length = own.settings, jnp.array([len(literal.text)])
    sees_noise = sampling.verification == "coupled" and sampling.temperature > 0

    def log_probs(path: tuple[int, ...]) -> np.ndarray:
        logits = literal.logits(path)
        if sees_noise:
            blind = np.exp(jax.nn.log_softmax(logits), dtype=np.float64)
            position = length[:, None] + len(path)
            draw = Draw(key[None], length, sampling)
            is_cut = np.isneginf(draw.filtered(logits))
            noise = draw.noise(position, len(logits))[0, 0]
            bent = logits + sampling.temperature * (noise - CUT_SETBACK * is_cut)
            seeing = np.exp(jax.nn.log_softmax(bent), dtype=np.float64)
            share = settings.noise_share
            return np.log(share * seeing + (1 - share) * blind).astype(np.float32)
        return np.asarray(jax.nn.log_softmax(logits))

    def best(scored: dict, count: int) -> list:
        return sorted(scored, key=lambda path: -scored[path])[:count]  # stable: earlier wins ties

    pool, beam = {}, {(): np.float32(0)}
    for _ in range(settings.depth):
        drafted = {}
        for path, score in beam.items():
            own_scores = log_probs(path)
            tokens = best(dict(enumerate(own_scores)), settings.top_k)
            drafted |= {(*path, token): score + own_scores[token] for token in tokens}
        pool |= drafted
        beam = {path: drafted[path] for path in best(drafted, settings.top_k)}
    kept = set(best(pool, settings.num_tokens - 1))
    return [path for path in pool if path in kept]


SAMPLED = Sampling(temperature=0.8, top_p=0.9)
CASES = {
    "greedy": (SMALL, Sampling(), "random"),
    "sampled": (SMALL, SAMPLED, "random"),
    "without filters": (SMALL, Sampling(temperature=1.3), "random"),
    "top-k": (SMALL, Sampling(temperature=1.0, top_k=2), "random"),
    "blind": (Eagle2Settings(3, 4, 14, noise_share=0.0), SAMPLED, "random"),
    "only noise": (Eagle2Settings(3, 4, 14, noise_share=1.0), SAMPLED, "random"),
    "rejection": (SMALL, Sampling(temperature=0.8, verification="rejection"), "random"),
    "all alike": (SMALL, Sampling(), "all alike"),
    "mostly alike": (SMALL, Sampling(), "mostly alike"),
    "certain": (Eagle2Settings(2, 4, 6), Sampling(), "certain"),
    "wide": (Eagle2Settings(6, 2, 30), Sampling(), "random"),
    "chain": (Eagle2Settings(1, 5, 5), SAMPLED, "random"),
    "whole pool": (Eagle2Settings(2, 3, 60), Sampling(), "random"),
    "shallow": (Eagle2Settings(3, 6, 3), Sampling(), "random"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_tree_is_the_best_of_the_beam_search(case):
    settings, sampling, heads = CASES[case]
    own, given = drafter(settings), prompt(BATCH)
    tree = proposed(own, sampling, heads)
    assert_well_formed(tree)
    assert tree.proposal is None
    assert tree.valid.all()
    for row in range(BATCH):
        text = given.tokens[row, : given.length[row]].tolist()
        literal = Literal(changed(heads), head()[0], target()[0], text)
        expected = by_definition(own, sampling, literal, jax.random.fold_in(KEY, row))
        assert found_paths(tree, row) == expected
        assert tree.tokens[row, 0] == text[-1]
        assert tree.depth.max() <= own.max_depth


def test_trees_in_the_middle_of_a_text_are_right_too():
    for row, literal, tree in later_trees("eagle2"):
        expected = by_definition(EAGLE2, Sampling(), literal, KEY)
        assert found_paths(tree, row) == expected


def test_the_cases_are_what_their_names_say():
    def tree_of(case):
        settings, sampling, heads = CASES[case]
        return proposed(drafter(settings), sampling, heads)

    np.testing.assert_array_equal(tree_of("blind").tokens, tree_of("rejection").tokens)
    np.testing.assert_array_equal(tree_of("blind").tokens, tree_of("greedy").tokens)
    assert (tree_of("sampled").tokens != tree_of("greedy").tokens).any()
    for case in ("blind", "only noise"):
        assert (tree_of(case).tokens != tree_of("sampled").tokens).any()
    alike = tree_of("all alike")
    assert set(alike.tokens[:, 1:].ravel().tolist()) == {0, 1, 2}, "the first of equal tokens"
    assert set(alike.depth[:, 1:].ravel().tolist()) == {1, 2, 3}
    certain = tree_of("certain").depth
    assert (certain.max(axis=1) == 4).all(), "children as certain as their parents follow them"
    shapes = {case: tree_of(case).num_nodes for case in ("whole pool", "shallow", "chain")}
    assert shapes == {"whole pool": 1 + 2 + 4 + 4, "shallow": 3, "chain": 5}
    assert tree_of("chain").is_chain and not tree_of("greedy").is_chain


class TwoTokens(Transformer):
    """Can say two tokens only."""

    @nn.nowrap
    def logits(self, params, x):
        logits = super().logits(params, x)
        return jnp.where(jnp.arange(40) < 2, logits, jnp.full_like(logits, -jnp.inf))


def test_nodes_that_cannot_be_said_come_last_and_are_void():
    own = drafter(Eagle2Settings(top_k=3, depth=3, num_tokens=21))
    own = Eagle2(own.head, TwoTokens(own.target.config), own.settings)
    tree = proposed(own, Sampling(), "random")
    assert_well_formed(tree)
    # Two below the root, two below each of them, and two below three of these four.
    np.testing.assert_array_equal(tree.num_valid(), [1 + 2 + 4 + 6] * BATCH)
    assert (tree.tokens[:, 1:13] < 2).all()


# ---- rejection ---------------------------------------------------------------------------------


def test_chosen_trees_keep_the_law():
    own = drafter(Eagle2Settings(2, 2, 6), VOCAB, layers=1)
    assert p_value(own, head(VOCAB, 1)[1]) > 1e-3


def test_trees_that_see_the_noise_keep_the_law_too():
    own = drafter(Eagle2Settings(2, 2, 6), VOCAB, layers=1)
    assert p_value(own, head(VOCAB, 1)[1], Sampling(0.9, top_p=0.95)) > 1e-3


# ---- settings ----------------------------------------------------------------------------------


def test_the_published_settings_are_the_default():
    own = drafter(Eagle2Settings())
    assert own == Eagle2(own.head, own.target, Eagle2Settings(10, 6, 60, 0.8))
    assert own == Eagle2Settings().build(own.head, own.target)
    assert (own.num_nodes, own.max_depth, own.num_fed) == (60, 6, 50)
    assert len(own.pool_depth) == 10 + 5 * 100
    assert hash(own) == hash(drafter(Eagle2Settings()))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"top_k": 0}, "top_k 0 must be at least 1: nothing would be drafted"),
        ({"depth": 0}, "depth 0 must be at least 1: nothing would be drafted"),
        ({"num_tokens": 1}, "num_tokens 1 must be at least 2: it counts the root"),
        ({"noise_share": -0.1}, r"noise_share -0.1 is outside \[0, 1\]; try 0.8"),
        ({"noise_share": 1.5}, r"noise_share 1.5 is outside \[0, 1\]"),
        ({"noise_share": float("nan")}, r"noise_share nan is outside \[0, 1\]"),
        ({"top_k": 41}, "top_k 41 exceeds the target's vocabulary of 40 tokens; lower it"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(SpecjaxError, match=message) as caught:
        drafter(Eagle2Settings(**settings))
    assert "\n" not in str(caught.value)
