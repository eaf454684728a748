"""Trees against their definitions, one node at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.tree import NO_PARENT, DraftTree, ancestors, chain, merge_paths

BATCH = 12


def path_of(tree: DraftTree, row: int, node: int) -> list[int]:
    """The nodes from the root to `node`."""
    path = [node]
    while path[0] != 0:
        path.insert(0, int(tree.parents[row, path[0]]))
        assert 0 <= path[0] < path[1], "a parent stands before its child"
    return path


def assert_well_formed(tree: DraftTree):
    """Asserts the invariants of `DraftTree`."""
    tree = jax.tree.map(np.asarray, tree)
    assert (tree.parents[:, 0] == NO_PARENT).all()
    assert (tree.depth[:, 0] == 0).all()
    assert tree.valid[:, 0].all()
    assert (tree.parents[:, 1:] >= 0).all()
    assert (tree.parents < np.arange(tree.num_nodes)).all(), "parents before children"
    assert (tree.valid[:, :-1] | ~tree.valid[:, 1:]).all(), "valid nodes first"
    for row in range(len(tree.tokens)):
        valid = [node for node in range(1, tree.num_nodes) if tree.valid[row, node]]
        siblings = {(tree.parents[row, node], tree.tokens[row, node]) for node in valid}
        assert len(siblings) == len(valid), "siblings carry distinct tokens"
        for node in valid:
            assert tree.depth[row, node] == len(path_of(tree, row, node)) - 1


def test_a_chain_is_the_root_and_its_first_drafted_tokens():
    drafted = np.arange(100, 100 + 4 * 5).reshape(5, 4)
    tree = chain(jnp.arange(5), jnp.asarray(drafted), count=jnp.arange(5))
    assert_well_formed(tree)
    assert tree.is_chain
    np.testing.assert_array_equal(tree.num_valid(), 1 + np.arange(5))
    for row in range(5):
        assert tree.tokens[row].tolist() == [row, *drafted[row]]
        assert tree.parents[row].tolist() == [NO_PARENT, 0, 1, 2, 3]
        assert tree.depth[row].tolist() == [0, 1, 2, 3, 4]


def trie(root: int, paths, num_nodes: int) -> tuple[list[int], list[int], list[int]]:
    """Tokens, parents and depths of the prefix tree, grown token by token until it is full."""
    tokens, parents, nodes = [root], [NO_PARENT], {(): 0}
    for path in paths:
        for end in range(1, len(path) + 1):
            prefix = tuple(path[:end])
            if prefix not in nodes and len(tokens) < num_nodes:
                nodes[prefix] = len(tokens)
                tokens.append(path[end - 1])
                parents.append(nodes[prefix[:-1]])
    depth = sorted((node, len(prefix)) for prefix, node in nodes.items())
    return tokens, parents, [steps for _, steps in depth]


merged = jax.jit(merge_paths, static_argnums=3)


@pytest.mark.parametrize("num_nodes", [1, 7, 40])
def test_merged_paths_are_the_trie_of_their_prefixes(num_nodes):
    numbers = np.random.default_rng(2)
    alphabet = 1 + np.arange(BATCH)[:, None, None] % 4  # from all paths equal to hardly any
    paths = numbers.integers(0, alphabet, (BATCH, 6, 5))
    lengths = numbers.integers(0, 6, (BATCH, 6))
    root = numbers.integers(0, 4, BATCH)
    tree = merged(jnp.asarray(root), jnp.asarray(paths), jnp.asarray(lengths), num_nodes)
    tree = jax.device_get(tree)
    assert_well_formed(tree)
    assert tree.num_nodes == num_nodes
    counts = []
    for row in range(BATCH):
        given = [paths[row, path, :length].tolist() for path, length in enumerate(lengths[row])]
        tokens, parents, depth = trie(root[row], given, num_nodes)
        count = len(tokens)
        assert tree.valid[row].sum() == count
        assert tree.tokens[row, :count].tolist() == tokens
        assert tree.parents[row, :count].tolist() == parents
        assert tree.depth[row, :count].tolist() == depth
        counts.append(count)
    if num_nodes < 40:
        assert max(counts) == num_nodes, "the budget cuts none of them"
    else:
        assert min(counts) < max(counts) < num_nodes, "the budget cuts some of them"


def tree_of(parents: np.ndarray, **fields) -> DraftTree:
    """A tree that is nothing but its parents."""
    parents = np.asarray(parents)
    depth = np.zeros_like(parents)
    for node in range(1, parents.shape[1]):
        depth[:, node] = 1 + np.take_along_axis(depth, parents[:, [node]], axis=1)[:, 0]
    return DraftTree(
        tokens=jnp.zeros(parents.shape, jnp.int32),
        parents=jnp.asarray(parents),
        depth=jnp.asarray(depth),
        valid=jnp.ones(parents.shape, bool),
        **fields,
    )


def brute_force(tree: DraftTree) -> np.ndarray:
    tree = jax.device_get(tree)
    seen = np.zeros((*tree.tokens.shape, tree.num_nodes), bool)
    for row, node in np.ndindex(*tree.tokens.shape):
        seen[row, node, path_of(tree, row, node)] = True
    return seen


def random_parents(num_nodes: int, reach: int) -> np.ndarray:
    """Trees in which a node's parent is one of the `reach` nodes before it."""
    numbers = np.random.default_rng(num_nodes)
    nodes = np.arange(num_nodes)
    parents = numbers.integers(np.maximum(nodes - reach, 0), np.maximum(nodes, 1), (4, num_nodes))
    parents[:, 0] = NO_PARENT
    return parents


climbed = jax.jit(ancestors, static_argnums=1)


def test_ancestors_are_found_by_climbing():
    tree = tree_of(np.concatenate([random_parents(12, reach) for reach in (1, 2, 12)]))
    np.testing.assert_array_equal(climbed(tree, 11), brute_force(tree))


@pytest.mark.parametrize("depth", [0, 1, 7, 8])
def test_the_root_is_an_ancestor_at_exactly_the_greatest_depth(depth):
    parents = np.arange(depth + 1)[None] - 1
    expected = np.tril(np.ones((1, depth + 1, depth + 1), bool))
    for is_chain in (False, True):
        found = climbed(tree_of(parents, is_chain=is_chain), depth)
        np.testing.assert_array_equal(found, expected)


def test_the_first_nodes_are_a_tree_themselves():
    tree = tree_of(random_parents(12, 4), draft_probs=jnp.zeros((4, 12, 3)))
    first = tree.first(5)
    assert {leaf.shape[:2] for leaf in jax.tree.leaves(first)} == {(4, 5)}
    np.testing.assert_array_equal(climbed(first, 4), brute_force(tree)[:, :5, :5])
