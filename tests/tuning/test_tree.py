"""Trees from accuracies, against all trees there are, and the ranks that accuracies come from."""

from functools import partial
from itertools import combinations, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.drafter import Params
from specjax.decoding.drafters.hydra import Hydra
from specjax.decoding.drafters.medusa import Medusa
from specjax.decoding.drafters.parallel_spec import ParallelSpec
from specjax.decoding.engine import Engine
from specjax.decoding.prompt import from_ids
from specjax.decoding.tree import DraftTree
from specjax.tuning.tree import answer_ranks, expected_length, greedy_tree, rank_accuracies, rank_of
from tests.decoding.heads import hydra_head, medusa_head, parallel_head
from tests.decoding.tiny import target


def falling(seed: int, depths: int, ranks: int) -> np.ndarray:
    """Accuracies that fall with the rank; what is missing to 1 is a miss."""
    drawn = np.random.default_rng(seed).dirichlet([0.8] * (ranks + 1), size=depths)
    return -np.sort(-drawn[:, :ranks], axis=1)


def mean_length(tree, accuracies: np.ndarray) -> float:
    """Accepted tokens, over all that the text may want: a rank at each depth, or none of them."""
    chances = np.concatenate([accuracies, 1 - accuracies.sum(axis=1, keepdims=True)], axis=1)
    depths, outcomes = chances.shape
    total = 0.0
    for wanted in product(range(outcomes), repeat=depths):
        chance = np.prod([chances[depth, rank] for depth, rank in enumerate(wanted)])
        total += chance * max([n for n in range(depths + 1) if n == 0 or wanted[:n] in tree])
    return total


def all_trees(depths: int, ranks: int, num_choices: int):
    nodes = [path for n in range(1, depths + 1) for path in product(range(ranks), repeat=n)]
    for tree in map(set, combinations(nodes, num_choices)):
        if all(len(choice) == 1 or choice[:-1] in tree for choice in tree):
            yield tree


@pytest.mark.parametrize(("depths", "ranks", "num_choices"), [(2, 3, 4), (3, 2, 5)])
def test_no_tree_of_the_size_is_accepted_longer(depths, ranks, num_choices):
    for seed in range(3):
        accuracies = falling(seed, depths, ranks)
        lengths = [mean_length(t, accuracies) for t in all_trees(depths, ranks, num_choices)]
        found = greedy_tree(accuracies, num_choices)
        assert len(set(found)) == num_choices
        assert mean_length(set(found), accuracies) == pytest.approx(max(lengths))
        assert expected_length(found, accuracies) == pytest.approx(1 + max(lengths))
        assert min(lengths) < max(lengths) - 0.01, "any tree would do"


def test_the_order_of_a_tree_by_hand():
    accuracies = np.array([[0.6, 0.3], [0.5, 0.5]])
    # 0.6, then 0.3 three times: the shallower first, then the smaller; then 0.15 twice.
    order = ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1))
    for count in range(1, 7):
        assert greedy_tree(accuracies, count) == order[:count]
    assert greedy_tree(accuracies, 100) == order, "there are no more"
    beyond = ((0,), (0, 0), (0, 2), (0, 0, 0), (3,))
    assert expected_length(beyond, accuracies) == pytest.approx(1 + 0.6 + 0.3)


def test_accuracies_are_shares_of_the_places_where_a_token_is_wanted():
    ranks = np.array([[0, 1], [0, 5], [2, -1], [1, -1]])
    expected = [[0.5, 0.25, 0.25], [0, 0.5, 0]]
    np.testing.assert_array_equal(rank_accuracies(ranks, 3), expected)


# ---- Ranks, against trees that hold all tokens, drafted place by place --------------------------

VOCAB, DEPTHS = 5, 3
ALL = tuple(path for n in range(1, DEPTHS + 1) for path in product(range(VOCAB), repeat=n))
HEADS = {
    "medusa": (Medusa, medusa_head),
    "hydra": (Hydra, partial(hydra_head, True)),
    "parallel": (ParallelSpec, partial(parallel_head, True)),
}


def ranks_below(tree: DraftTree, row: int, wanted: list[int]) -> list[int]:
    """The rank of each wanted token among its siblings, the ones before it being accepted."""
    tokens, parents = np.asarray(tree.tokens[row]), np.asarray(tree.parents[row])
    here, found = 0, []
    for token in wanted:
        children = np.flatnonzero(parents == here)
        assert sorted(tokens[children]) == list(range(VOCAB))
        found.append(tokens[children].tolist().index(token))
        here = children[found[-1]]
    return found + [-1] * (DEPTHS - len(wanted))


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEADS)
def test_ranks_are_those_of_drafted_trees(kind):
    make, head_of = HEADS[kind]
    (head, weights), (model, params) = head_of(vocab_size=VOCAB), target(VOCAB)
    numbers = np.random.default_rng(4)
    texts = [(numbers.integers(0, VOCAB, length).tolist(), 6) for length in (19, 11)]
    found = answer_ranks(texts, head, weights, model, params)[:, :DEPTHS]
    places = [(text, at) for text, start in texts for at in range(start, len(text))]
    assert len(found) == len(places)
    engine, given = Engine(model, make(head, ALL), max_new_tokens=4), Params(params, weights)
    prompts = from_ids([text[:at] for text, at in places], bucket=32)
    state = engine.prefill(given, prompts, jax.random.key(0))
    tree = jax.jit(lambda state: engine.propose(given, state)[1].tree)(state)
    expected = [
        ranks_below(tree, row, text[at : at + DEPTHS]) for row, (text, at) in enumerate(places)
    ]
    np.testing.assert_array_equal(found, expected)
    assert len(np.unique(found)) == VOCAB + 1, "some rank was never seen"


def test_equal_logits_are_ranked_as_top_k_takes_them():
    logits = jnp.array([[[1.0, 3.0, 3.0, 0.0, 3.0]] * 5])
    _, order = jax.lax.top_k(logits[0, 0], 5)
    found = rank_of(logits, jnp.arange(5)[None])
    np.testing.assert_array_equal(order[found[0]], np.arange(5))
