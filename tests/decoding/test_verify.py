"""Verification against exact enumeration, with wrong rules that must be told apart.

The walk is a step function of its uniform numbers, so its exact distribution is found by bisection
of every threshold: nothing of the rule itself is assumed.
"""

from functools import partial
from itertools import permutations, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.sampling import Sampling
from specjax.decoding.tree import DraftTree, chain, from_choices
from specjax.decoding.verify import follow, reject

PARENTS = (-1, 0, 0, 1, 1)
DEPTH = (0, 1, 1, 2, 2)
VOCAB = 3


def tables(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Target and proposal after [root, each token at depth 1], and the target one deeper."""
    numbers = np.random.default_rng(seed)
    p = numbers.dirichlet([0.7] * VOCAB, size=1 + VOCAB + VOCAB**2)
    q = numbers.dirichlet([0.7] * VOCAB, size=1 + VOCAB)
    return p, q


def without_replacement(q: np.ndarray, first: int, second: int) -> float:
    return q[first] * q[second] / (1 - q[first])


def exact_distribution(rule, p: np.ndarray, q: np.ndarray, drawn: bool) -> np.ndarray:
    """Probability of each first two tokens when two siblings are drawn below the root and below
    the first of them: `[VOCAB, VOCAB]`."""
    total = np.zeros((VOCAB, VOCAB))
    pairs = list(permutations(range(VOCAB), 2))
    for upper, lower in product(pairs, pairs):
        if drawn:
            weight = without_replacement(q[0], *upper)
            weight *= without_replacement(q[1 + upper[0]], *lower)
        else:  # chosen, not drawn: one fixed tree
            weight = float(upper == pairs[1] and lower == pairs[4])
        if weight:
            tree = np.array([0, *upper, *lower])
            for tokens, chance in outcomes(rule, tree, p, q, drawn):
                total[tokens] += weight * chance
    return total


def outcomes(rule, tokens, p, q, drawn):
    """Every way through one tree: the first two tokens that come out, and how likely."""
    below = [0, 1 + tokens[1], 1 + tokens[2]]
    deeper = [1 + VOCAB + VOCAB * tokens[1] + tokens[node] for node in (3, 4)]
    target = jnp.asarray(p[below + deeper], jnp.float32)
    proposal = jnp.asarray(q[[*below, 0, 0]], jnp.float32) if drawn else None

    def walk(uniform, count):
        last, rest = rule(jnp.asarray(tokens), proposal, target, jnp.asarray(uniform), count)
        return int(last), np.asarray(rest, np.float64)

    def explore(uniform, chance):
        node = len(uniform) + 1
        if chance == 0:
            return
        if node == len(tokens):
            last, rest = walk([0.0, *uniform], node)
            yield last, rest, chance
            return
        threshold = bisect(lambda u: walk([0.0, *uniform, u], node + 1)[0] == node)
        yield from explore([*uniform, 0.0], chance * threshold)
        yield from explore([*uniform, 1 - 1e-7], chance * (1 - threshold))

    for last, rest, chance in explore([], 1.0):
        rest = rest / rest.sum()
        if last == 0:  # the bonus is the first token; the second is plain decoding's
            for first in range(VOCAB):
                for second in range(VOCAB):
                    yield (first, second), chance * rest[first] * p[1 + first][second]
        elif DEPTH[last] == 1:
            for second in range(VOCAB):
                yield (tokens[last], second), chance * rest[second]
        else:
            yield (tokens[1], tokens[last]), chance


def bisect(is_hit) -> float:
    """The share of uniform numbers in [0, 1) for which the node is accepted."""
    if not is_hit(0.0):
        return 0.0
    if is_hit(1 - 1e-7):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(22):
        middle = (low + high) / 2
        low, high = (middle, high) if is_hit(middle) else (low, middle)
    return low


@partial(jax.jit, static_argnames="mutant")
def _run(tokens, proposal, target, uniform, count, mutant=None):
    parents = jnp.asarray(PARENTS)
    valid = jnp.arange(len(PARENTS)) < count
    if mutant == "softmax q of chosen drafts":
        proposal = target * 0.5 + 1 / (2 * VOCAB)
    last, rest = reject(tokens, parents, valid, proposal, target, uniform, count)
    if mutant == "no residual":
        rest = target[last]
    return last, rest


def rule(tokens, proposal, target, uniform, count, mutant=None):
    uniform = jnp.zeros(len(PARENTS)).at[: len(uniform)].set(uniform)
    return _run(tokens, proposal, target, uniform, count, mutant)


def plain(p: np.ndarray) -> np.ndarray:
    return p[0][:, None] * p[1 : 1 + VOCAB]


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "chosen"])
def test_rejection_on_trees_is_exactly_plain_decoding(drawn):
    for seed in range(2):
        p, q = tables(seed)
        found = exact_distribution(rule, p, q, drawn)
        np.testing.assert_allclose(found, plain(p), atol=2e-5)


@pytest.mark.parametrize(
    ("mutant", "drawn"), [("no residual", True), ("softmax q of chosen drafts", False)]
)
def test_wrong_rules_are_told_apart(mutant, drawn):
    p, q = tables(0)
    found = exact_distribution(partial(rule, mutant=mutant), p, q, drawn)
    assert np.abs(found - plain(p)).max() > 0.01


def test_a_vanished_residual_leaves_the_target():
    """p equal to q: a miss can only be rounding, and must not leave an all-zero distribution."""
    p = jnp.asarray([[0.5, 0.5, 0.0]] * 2)
    last, rest = reject(
        tokens=jnp.array([0, 1]),
        parents=jnp.array([-1, 0]),
        valid=jnp.array([True, True]),
        proposal=p,
        target=p,
        uniform=jnp.array([0.0, 1.0]),
        last_valid=jnp.array(2),
    )
    assert last == 0
    np.testing.assert_allclose(rest, p[0])


def slow_walk(tree: DraftTree, wanted: np.ndarray, row: int) -> tuple[list[int], int]:
    """The definition, one node at a time."""
    here, path = 0, [0]
    for node in range(1, tree.num_nodes):
        is_child = tree.parents[row, node] == here
        if tree.valid[row, node] and is_child and tree.tokens[row, node] == wanted[row, here]:
            here = node
            path.append(node)
    return path, int(wanted[row, here])


def test_following_the_wanted_tokens_equals_the_walk_node_by_node():
    numbers = np.random.default_rng(0)
    choices = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 2), (0, 1, 0), (0, 1, 2), (2, 2, 1))
    longest = 0
    for _ in range(20):
        # Three tokens per depth out of four: the truth is often among them.
        candidates = np.stack([numbers.permuted(np.arange(4))[:3] for _ in range(18)])
        root = jnp.asarray(numbers.integers(0, 4, 6))
        tree = from_choices(root, jnp.asarray(candidates.reshape(6, 3, 3)), choices)
        count = numbers.integers(1, tree.num_nodes + 1, (6, 1))
        tree = type(tree)(
            tree.tokens, tree.parents, tree.depth, jnp.arange(tree.num_nodes)[None, :] < count
        )
        wanted = numbers.integers(0, 4, tree.tokens.shape)
        found = follow(tree, jnp.asarray(wanted), max_depth=3)
        for row in range(6):
            path, bonus = slow_walk(tree, wanted, row)
            assert found.num_accepted[row] == len(path) - 1
            assert found.path[row].tolist() == path + [0] * (4 - len(path))
            assert found.bonus[row] == bonus
            longest = max(longest, len(path))
    assert longest == 4, "no trial went to the end of a path"


def test_padding_never_matches():
    tree = chain(jnp.array([5]), jnp.array([[0, 0, 0]]), jnp.array([1]))
    found = follow(tree, jnp.zeros((1, 4), jnp.int32), max_depth=3)
    assert found.num_accepted == 1


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_sampling_settings_are_checked(temperature):
    assert Sampling(temperature=temperature).is_greedy == (temperature == 0)
