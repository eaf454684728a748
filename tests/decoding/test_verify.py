"""Verification against exact enumeration, with wrong rules that must be caught.

The walk is a step function of its uniform numbers, so its exact distribution is found by bisection
of every threshold: nothing of the rule itself is assumed.
"""

from dataclasses import replace
from functools import partial
from itertools import permutations, product

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from specjax.decoding.per_sequence import per_sequence
from specjax.decoding.sampling import Draw, Sampling, sequence_keys
from specjax.decoding.tree import DraftTree, Verification
from specjax.decoding.verify import follow, reject, verify, walk
from tests.decoding.test_tree import path_of
from tests.decoding.tiny import from_choices, slow_except

PARENTS = (-1, 0, 0, 1, 1)
DEPTH = (0, 1, 1, 2, 2)
VOCAB = 3


NUMBERS = np.random.default_rng(0)
# Target and proposal after [root, each token at depth 1], and the target one deeper.
P = NUMBERS.dirichlet([0.7] * VOCAB, size=1 + VOCAB + VOCAB**2)
Q = NUMBERS.dirichlet([0.7] * VOCAB, size=1 + VOCAB)
PLAIN = P[0][:, None] * P[1 : 1 + VOCAB]


def without_replacement(q: np.ndarray, first: int, second: int) -> float:
    return q[first] * q[second] / (1 - q[first])


def exact_distribution(rule, drawn: bool) -> np.ndarray:
    """Probability of each first two tokens when two siblings are drawn below the root and below
    the first of them: `[VOCAB, VOCAB]`."""
    total = np.zeros((VOCAB, VOCAB))
    pairs = list(permutations(range(VOCAB), 2))
    for upper, lower in product(pairs, pairs):
        if drawn:
            weight = without_replacement(Q[0], *upper)
            weight *= without_replacement(Q[1 + upper[0]], *lower)
        else:  # chosen, not drawn: one fixed tree
            weight = float(upper == pairs[1] and lower == pairs[4])
        if weight:
            tree = np.array([0, *upper, *lower])
            for tokens, chance in outcomes(rule, tree, drawn):
                total[tokens] += weight * chance
    return total


def outcomes(rule, tokens, drawn):
    """Every way through one tree: the first two tokens that come out, and how likely."""
    below = [0, 1 + tokens[1], 1 + tokens[2]]
    deeper = [1 + VOCAB + VOCAB * tokens[1] + tokens[node] for node in (3, 4)]
    target = jnp.asarray(P[below + deeper], jnp.float32)
    draft_probs = jnp.asarray(Q[[*below, 0, 0]], jnp.float32) if drawn else None

    def walk(uniform, count):
        uniform = np.pad(np.float32(uniform), (0, len(PARENTS) - len(uniform)))
        last, rest = rule(jnp.asarray(tokens), draft_probs, target, uniform, count)
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
            for first, second in np.ndindex(VOCAB, VOCAB):
                yield (first, second), chance * rest[first] * P[1 + first][second]
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
def rule(tokens, draft_probs, target, uniform, count, mutant=None):
    parents = jnp.asarray(PARENTS)
    valid = jnp.arange(len(PARENTS)) < count
    if mutant == "softmax q of chosen drafts":
        draft_probs = target * 0.5 + 1 / (2 * VOCAB)
    last, rest = reject(tokens, parents, valid, draft_probs, target, uniform, count)
    if mutant == "no residual":
        rest = target[last]
    return last, rest


@pytest.mark.parametrize(
    ("mutant", "drawn"),
    [(None, True), (None, False), ("no residual", True), ("softmax q of chosen drafts", False)],
)
def test_rejection_on_trees_is_exactly_plain_decoding_and_wrong_rules_are_caught(mutant, drawn):
    error = np.abs(exact_distribution(partial(rule, mutant=mutant), drawn) - PLAIN).max()
    assert error > 0.01 if mutant else error < 2e-5


def test_a_vanished_residual_leaves_the_target():
    """p equal to q: a miss can only be rounding, and must not leave an all-zero distribution."""
    p, chain = jnp.asarray([[0.5, 0.5, 0.0]] * 2), (jnp.array([0, 1]), jnp.array([-1, 0]))
    is_valid, uniform = jnp.array([True, True]), jnp.array([0.0, 1.0])
    last, rest = reject(*chain, is_valid, p, p, uniform, jnp.array(2))
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


CHOICES = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 2), (0, 1, 0), (1, 0, 0), (2, 2, 1))
ROWS, NODES, TOKENS = 48, len(CHOICES) + 1, 6


def random_trees(seed: int, num_tokens: int = TOKENS) -> tuple[DraftTree, np.ndarray]:
    """Trees of which some nodes are padding, and logits for them."""
    numbers = np.random.default_rng(seed)
    candidates = np.stack([numbers.permuted(np.arange(num_tokens))[:3] for _ in range(3 * ROWS)])
    root = jnp.asarray(numbers.integers(0, num_tokens, ROWS))
    tree = from_choices(root, jnp.asarray(candidates.reshape(ROWS, 3, 3)), CHOICES)
    count = np.where(numbers.random((ROWS, 1)) < 0.5, NODES, numbers.integers(1, NODES, (ROWS, 1)))
    tree = replace(tree, valid=jnp.arange(NODES)[None, :] < count)
    return tree, numbers.normal(0, 0.7, (ROWS, NODES, num_tokens)).astype(np.float32)


def walk_by(tree: DraftTree, wanted: jax.Array, max_depth: int) -> Verification:
    after = lambda node: jnp.take_along_axis(wanted, node[:, None], axis=1)[:, 0]  # noqa: E731
    return walk(tree, after, max_depth)


@pytest.mark.parametrize("rule", [follow, walk_by])
def test_following_the_wanted_tokens_equals_the_walk_node_by_node(rule):
    follow_all, longest = jax.jit(partial(rule, max_depth=3)), 0
    for seed in range(4):
        tree, logits = random_trees(seed, num_tokens=4)
        wanted = logits.argmax(axis=-1)
        tree, found = jax.device_get((tree, follow_all(tree, jnp.asarray(wanted))))
        for row in range(ROWS):
            path, bonus = slow_walk(tree, wanted, row)
            assert found.num_accepted[row] == len(path) - 1
            assert found.path[row].tolist() == path + [0] * (4 - len(path))
            assert found.bonus[row] == bonus
            longest = max(longest, len(path))
    assert longest == 4, "no trial went to the end of a path"


@pytest.mark.parametrize("temperatures", slow_except([[0.8], [0.8, 0.0]], [0.8, 0.0]), ids=str)
def test_drawing_node_by_node_accepts_what_drawing_at_once_accepts(monkeypatch, temperatures):
    samplings = [Sampling(temperature=each, top_k=4) for each in temperatures]
    sampling, values = per_sequence(samplings * (ROWS // len(samplings)), TOKENS)
    tree, logits = random_trees(0)
    draw = replace(draws(ROWS, sampling), values=values)

    def verified_by(rule):
        monkeypatch.setattr(lax, "platform_dependent", lambda **rules: rules[rule]())
        with jax.enable_x64(True):
            return verify(tree, jnp.asarray(logits), draw, jnp.full(ROWS, START), 3)

    one_by_one = verified_by("cpu")
    assert 0 < jnp.mean(one_by_one.num_accepted) < 3
    chex.assert_trees_all_equal(verified_by("default"), one_by_one)


# ---- typical -----------------------------------------------------------------------------------

START = 9  # where the roots stand


@partial(jax.jit, static_argnums=2)
def verified(tree: DraftTree, logits, sampling: Sampling) -> Verification:
    return verify(tree, logits, draws(len(logits), sampling), jnp.full(len(logits), START), 3)


def draws(rows: int, sampling: Sampling) -> Draw:
    return Draw(sequence_keys(jax.random.key(3), rows), jnp.full(rows, START + 1), sampling)


def slow_typical(tree: DraftTree, probs: np.ndarray, row: int, sampling: Sampling) -> list[int]:
    """The nodes that may end the path, the best first: the definition, node by node."""
    endings = {0: 0.0}  # node -> sum of log p from the root
    for node in range(1, tree.num_nodes):
        above = int(tree.parents[row, node])
        law = probs[row, above]
        entropy = -sum(p * np.log(p + 1e-5) for p in law)
        least = min(sampling.typical_epsilon, sampling.typical_delta * np.exp(-entropy))
        p = law[int(tree.tokens[row, node])]
        if above in endings and bool(tree.valid[row, node]) and p > least:
            endings[node] = endings[above] + np.log(p)
    depth = np.asarray(tree.depth[row])
    return sorted(endings, key=lambda node: (-depth[node], -endings[node], node))


@pytest.mark.parametrize(("epsilon", "delta"), [(0.09, 0.3), (1.0, 1.0), (1.0, 0.0)])
def test_typical_acceptance_is_the_definition(epsilon, delta):
    sampling = Sampling(0.7, None, 0.9, "typical", epsilon, delta)
    tree, logits = random_trees(0)
    tree, found = jax.device_get((tree, verified(tree, logits, sampling)))
    probs = np.exp(np.asarray(sampling.filtered(jnp.asarray(logits)), np.float64))
    depth = tree.depth[0]
    positions = jnp.broadcast_to(START + 1 + jnp.arange(4), (ROWS, 4))
    noise = np.asarray(draws(ROWS, sampling).noise(positions, TOKENS))
    lengths, num_ties = [], 0
    for row in range(ROWS):
        endings = slow_typical(tree, probs, row, sampling)
        last = endings[0]
        path = path_of(tree, row, last)
        assert found.num_accepted[row] == depth[last]
        assert found.path[row].tolist() == path + [0] * (4 - len(path))
        with np.errstate(divide="ignore"):
            scores = np.log(probs[row, last]) + noise[row, depth[last]]
        assert found.bonus[row] == np.argmax(scores)
        lengths.append(len(path))
        num_ties += last != min(node for node in endings if depth[node] == depth[last])
    assert 4 in lengths, "no trial went to the end of a path"
    if delta < 1:
        assert num_ties > 3, "the first of the longest paths was always the likeliest"
    else:
        assert 1 in lengths, "nothing was rejected"


def test_greedy_typical_is_coupled():
    tree, logits = random_trees(2)
    typical = verified(tree, logits, Sampling(verification="typical", typical_delta=0.0))
    jax.tree.map(np.testing.assert_array_equal, typical, verified(tree, logits, Sampling()))
    assert typical.num_accepted.any()
