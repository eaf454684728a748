"""The trees of drafters with a head, against literal readings of one path at a time."""

from collections.abc import Callable
from functools import cache
from itertools import product

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import DraftTree, Draw, Engine, Sampling
from specjax.decoding.drafters._trees import CUT_PENALTY, Choices
from specjax.decoding.drafters.eagle2 import Eagle2
from specjax.decoding.state import LoopState
from specjax.models.transformer import Transformer
from tests.decoding import heads
from tests.decoding.rounds import KEY, proposals
from tests.decoding.test_tree import assert_well_formed, path_of
from tests.decoding.tiny import BATCH, prompt, slow_except, target

SAMPLINGS = {  # golden traces show trees of a fixed shape at temperature 0
    "sampled": Sampling(temperature=0.8, top_k=9, top_p=0.9),
    "rejection": Sampling(temperature=0.8, top_k=2, verification="rejection"),
}
Paths = list[tuple[int, ...]]


def first_state(headed: heads.Headed) -> LoopState:
    """The state after prefill, which is that of any drafter with this head and depth."""
    drafter = headed.drafter
    if isinstance(drafter, Eagle2):
        drafter = Eagle2(drafter.head, top_k=3, depth=drafter.depth, num_tokens=12)
    engine = Engine(target()[0], drafter, max_new_tokens=60)
    return jax.device_get(engine.prefill(headed.request, prompt(), KEY))


def trees_of(headed: heads.Headed, sampling: Sampling, states: list[LoopState], model=None):
    """Returns what is drafted in these states; each must be a tree of the drafter's own size."""
    engine = Engine(model or target()[0], headed.drafter, sampling, max_new_tokens=60)
    trees = proposals(engine, headed.request, states)
    for tree in trees:
        assert_well_formed(tree)
        assert tree.num_nodes == headed.drafter.num_nodes
        assert tree.depth.max() <= headed.drafter.max_depth
    return trees


def found_paths(tree: DraftTree, row: int) -> Paths:
    """The tokens from the root to each valid node, in the order of the nodes."""
    nodes = [path_of(tree, row, node)[1:] for node in range(1, int(tree.valid[row].sum()))]
    return [tuple(tree.tokens[row, path].tolist()) for path in nodes]


@jax.jit
def law_and_noise(draw: Draw, row: int, logits, depth: int):
    """The filtered log-probabilities, and the noise that many tokens below the root of a row."""
    noise = draw.noise(draw.round_start[:, None] + depth, len(logits))
    return draw.filtered(logits), noise[row, 0]


def readings(headed: heads.Headed, sampling: Sampling, state: LoopState):
    """Yields each row that goes on, its draw, its root, and the logits below its text."""
    draw = Draw(jnp.asarray(state.sequence_keys), jnp.asarray(state.length), sampling)
    for row in np.flatnonzero(~state.is_done):
        text = state.tokens[row, : state.length[row]].tolist()
        yield row, draw, text[-1], heads.literal(headed, text)


def by_choices(choices: Choices, draw: Draw, row: int, logits_after: Callable):
    """The paths of tokens by `choices`, one node at a time, and what each was drawn from."""
    sampling = draw.sampling
    paths: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
    laws: dict[tuple[int, ...], np.ndarray] = {}
    for choice in sorted(choices, key=lambda choice: (len(choice), choice)):
        if choice[:-1] not in paths:  # cannot be drawn
            continue
        path = paths[choice[:-1]]
        logits = logits_after(path)
        law, noise = map(np.asarray, law_and_noise(draw, row, logits, len(path)))
        laws[path] = np.exp(law)
        # What the target would draw; a token that its filters cut is set back.
        scores = logits / sampling.temperature + noise - CUT_PENALTY * np.isneginf(law)
        if sampling.needs_draft_probs:
            scores = law + noise
        ranked = np.argsort(-np.asarray(scores), kind="stable")
        if np.isfinite(scores[ranked[choice[-1]]]):
            paths[choice] = (*path, int(ranked[choice[-1]]))
    return [path for choice, path in paths.items() if choice], laws


@pytest.mark.parametrize(
    "name, sampling",
    slow_except(
        [
            *product(("eagle", "parallel"), ("sampled", "rejection")),
            *product(("hydra", "hydra with prefix", "parallel of tokens"), ("sampled",)),
            ("medusa", "rejection"),
        ],
        ("hydra", "sampled"),
    ),
)
def test_every_node_is_the_token_of_its_rank_below_its_parent(name, sampling):
    """At the start of texts, and in their middle after paths of several lengths."""
    headed, sampling = heads.STATIC[name], SAMPLINGS[sampling]
    states, choices = [each.before for each in heads.played_by(name)[:8:2]], headed.drafter.choices
    for state, tree in zip(states, trees_of(headed, sampling, states), strict=True):
        assert (tree.draft_probs is not None) == sampling.needs_draft_probs
        for row, draw, root, logits_after in readings(headed, sampling, state):
            expected, laws = by_choices(choices, draw, row, logits_after)
            assert tree.tokens[row, 0] == root
            assert found_paths(tree, row) == expected
            if tree.draft_probs is None:
                assert tree.valid[row].all()
                continue
            assert len(expected) < len(choices), "no token was filtered out"
            for path, law in laws.items():  # what each node says that its children are drawn from
                node = 1 + expected.index(path) if path else 0
                np.testing.assert_allclose(tree.draft_probs[row, node], law, atol=1e-4)
                assert all(law[other[-1]] > 0 for other in expected if other[:-1] == path)


SAMPLED = Sampling(temperature=0.8, top_p=0.9)


def by_confidence(headed: heads.Headed, draw: Draw, row: int, logits_after: Callable) -> Paths:
    """The paths of the nodes that are kept, in the order in which they were drafted.

    EAGLE-2 drafts below the `top_k` best nodes of a depth, the others below all.
    """
    drafter, sampling = headed.drafter, draw.sampling

    def log_probs(path: tuple[int, ...]) -> np.ndarray:
        logits = logits_after(path)
        if sampling.is_greedy or sampling.needs_draft_probs:
            return np.asarray(jax.nn.log_softmax(logits))
        blind = np.exp(jax.nn.log_softmax(logits), dtype=np.float64)
        law, noise = map(np.asarray, law_and_noise(draw, row, logits, len(path)))
        bent = logits + sampling.temperature * (noise - CUT_PENALTY * np.isneginf(law))
        seeing = np.exp(jax.nn.log_softmax(bent), dtype=np.float64)
        share = drafter.noise_share
        return np.log(share * seeing + (1 - share) * blind).astype(np.float32)

    def best(scored: dict, count: int) -> list:
        return sorted(scored, key=lambda path: -scored[path])[:count]  # stable: earlier wins ties

    pool, beam = {}, {(): np.float32(0)}
    for _ in range(drafter.max_depth):
        drafted = {}
        for path, score in beam.items():
            own_scores = log_probs(path)
            tokens = best(dict(enumerate(own_scores)), drafter.top_k)
            drafted |= {(*path, token): score + own_scores[token] for token in tokens}
        pool |= drafted
        count = drafter.top_k if isinstance(drafter, Eagle2) else len(drafted)
        beam = {path: drafted[path] for path in best(drafted, count)}
    kept = set(best(pool, drafter.num_tokens - 1))
    return [path for path in pool if path in kept]


def assert_by_confidence(
    headed: heads.Headed, sampling: Sampling, state: LoopState, tree: DraftTree
):
    assert tree.draft_probs is None
    for row, draw, root, logits_after in readings(headed, sampling, state):
        expected = by_confidence(headed, draw, row, logits_after)
        found = found_paths(tree, row)
        assert tree.tokens[row, 0] == root
        assert tree.valid[row].all()
        if isinstance(headed.drafter, Eagle2):
            assert found == expected
        else:
            assert set(found) == set(expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", heads.DYNAMIC)
def test_dynamic_trees_in_the_middle_of_a_text_are_the_most_likely_nodes(name):
    headed = heads.DYNAMIC[name]
    played = heads.played_by(name.removesuffix(" dynamic"))  # the state is that of a static tree
    states = [each.before for each in played[:8:2]]
    for sampling in (Sampling(), SAMPLED):
        for state, tree in zip(states, trees_of(headed, sampling, states), strict=True):
            assert_by_confidence(headed, sampling, state, tree)


def eagle2(top_k: int, depth: int, num_tokens: int, lm_head: Callable = lambda w: w * 4, **noise):
    weights = target()[1]
    weights = weights | {"lm_head": {"weight": lm_head(weights["lm_head"]["weight"])}}
    sizes = {"top_k": top_k, "depth": depth, "num_tokens": num_tokens}
    return heads.Headed(Eagle2, heads.eagle_head, weights, **sizes, **noise)


EAGLE2_CASES = {
    "sampled": (lambda: eagle2(3, 3, 12), SAMPLED),
    "top-k": (lambda: eagle2(3, 4, 14), Sampling(temperature=1.0, top_k=2)),
    "blind": (lambda: eagle2(3, 4, 14, noise_share=0.0), SAMPLED),
    "only noise": (lambda: eagle2(3, 4, 14, noise_share=1.0), SAMPLED),
    "rejection": (lambda: eagle2(3, 4, 14), Sampling(0.8, verification="rejection")),
    # LM heads that make ties: of most tokens, of parent and child.
    "mostly equal": (lambda: eagle2(3, 4, 14, lambda w: w.at[5:].set(0)), Sampling()),
    "certain": (lambda: eagle2(2, 4, 6, lambda w: w * 1e4), Sampling()),
    "chain": (lambda: eagle2(1, 5, 5), SAMPLED),
    "whole pool": (lambda: eagle2(2, 3, 60), Sampling()),
    "shallow": (lambda: eagle2(3, 6, 3), Sampling()),
}


@pytest.mark.parametrize("case", slow_except(EAGLE2_CASES, "sampled"))
def test_eagle2_drafts_the_best_of_its_beam_search(case):
    make, sampling = EAGLE2_CASES[case]
    headed = make()
    state = first_state(headed)
    assert_by_confidence(headed, sampling, state, *trees_of(headed, sampling, [state]))


class TwoTokens(Transformer):
    """Generates only two different tokens."""

    @nn.nowrap
    def logits(self, params, hidden, lm_head=None):
        logits = super().logits(params, hidden, lm_head)
        return jnp.where(jnp.arange(40) < 2, logits, jnp.full_like(logits, -jnp.inf))


def test_impossible_tokens_come_last_and_are_not_valid():
    headed = eagle2(3, 3, 21)
    state, model = first_state(headed), TwoTokens(target()[0].config)
    [tree] = trees_of(headed, Sampling(), [state], model)
    # Two below the root, two below each of them, and two below three of these four.
    np.testing.assert_array_equal(tree.num_valid(), [1 + 2 + 4 + 6] * BATCH)
    assert (tree.tokens[:, 1:13] < 2).all()


def test_only_tokens_of_the_draft_vocabulary_are_drafted():
    drafted = list(range(3, 40, 2))
    make = cache(lambda: heads.narrowed(heads.eagle_head(), drafted))
    other = heads.Headed(Eagle2, make, **heads.EAGLE2.settings)
    [tree] = trees_of(other, SAMPLINGS["sampled"], [first_state(other)])
    assert np.isin(tree.tokens[tree.valid & (tree.depth > 0)], drafted).all()
