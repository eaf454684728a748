"""REST against a plain count of all continuations, on many small random datastores."""

from collections import Counter
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.core.settings import SettingError
from specjax.data import datastore as datastore_module
from specjax.data.datastore import build, params
from specjax.decoding import Context, DraftTree, Draw, Params, Sampling
from specjax.decoding.drafters import retrieval
from specjax.decoding.drafters.retrieval import Retrieval
from specjax.decoding.sampling import sequence_keys
from tests.decoding.test_head_trees import found_paths
from tests.decoding.test_tree import assert_well_formed
from tests.decoding.tiny import target

CORPORA, DOCUMENTS, TOKENS = 6, 14, 260  # all of one size, so that one program serves them
TEXTS, SLOTS = 40, 24
MODEL = target()[0]


@cache
def corpus(number: int) -> list[list[int]]:
    """Random documents from alphabets of 2 to 7 tokens, with a few that begin like others."""
    numbers = np.random.default_rng(number)
    cuts = np.sort(numbers.choice(np.arange(1, TOKENS), DOCUMENTS - 1, replace=False))
    flat = numbers.integers(0, 2 + number % 6, TOKENS)
    documents = [part.tolist() for part in np.split(flat, cuts)]
    for document, other in zip(documents[::3], documents[1::3], strict=False):
        count = min(len(document), len(other)) // 2
        document[:count] = other[:count]
    return documents


@cache
def texts(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Texts of 1 to SLOTS tokens that mostly end in a piece of the corpus."""
    numbers = np.random.default_rng(100 + number)
    tokens = numbers.integers(0, 2 + number % 6, (TEXTS, SLOTS))
    length = numbers.integers(1, SLOTS + 1, TEXTS)
    for row in range(0, TEXTS, 2):
        document = corpus(number)[numbers.integers(DOCUMENTS)]
        end = numbers.integers(1, len(document) + 1)
        piece = document[max(0, end - length[row]) : end]
        tokens[row, length[row] - len(piece) : length[row]] = piece
    return tokens, length


@partial(jax.jit, static_argnames="drafter")
def propose(drafter: Retrieval, arrays, tokens, length) -> DraftTree:
    draw = Draw(sequence_keys(jax.random.key(0), len(tokens)), length, Sampling())
    context = Context(tokens, length)
    return drafter.propose(MODEL, Params(None, arrays), None, context, draw)[0].tree


def prefixes(drafter: Retrieval, tree: DraftTree, rows) -> list[list[tuple[int, ...]]]:
    """The drafted prefixes of each row in the order of their nodes; the trees are checked."""
    tree = jax.device_get(tree)
    assert tree.tokens.shape == (len(rows), drafter.num_nodes)
    assert_well_formed(tree)
    assert tree.tokens[:, 0].tolist() == [text[-1] for text in rows]
    for values in (tree.tokens, tree.parents, tree.depth):
        assert not values[~tree.valid].any(), "nodes that mean nothing are all zeros"
    return [found_paths(tree, row) for row in range(len(rows))]


def counted(drafter: Retrieval, documents, text) -> list[tuple[int, ...]]:
    """The same by a count of every continuation in a dictionary."""
    for size in range(min(drafter.longest_query, len(text)), drafter.shortest_query - 1, -1):
        query = list(text[len(text) - size :])
        found = [
            tuple(document[at + size :])
            for document in documents
            for at in range(len(document) - size)
            if document[at : at + size] == query
        ]
        if found:
            break
    else:
        return []
    found.sort()
    count = min(len(found), drafter.max_matches)
    sample = [found[number * len(found) // count] for number in range(count)]
    frequency = Counter(
        continuation[:depth]
        for continuation in sample
        for depth in range(1, min(len(continuation), drafter.num_tokens) + 1)
    )
    ranked = sorted(frequency, key=lambda prefix: (-frequency[prefix], len(prefix), prefix))
    return ranked[: drafter.max_drafted]


@pytest.mark.parametrize(
    "drafter",
    [
        Retrieval(),
        Retrieval(longest_query=2, shortest_query=2, num_tokens=16, max_drafted=200),
        Retrieval(longest_query=4, shortest_query=1, num_tokens=3, max_drafted=9, max_matches=7),
    ],
)
def test_the_tree_holds_the_most_frequent_continuations(drafter):
    empty, full = 0, 0
    for number in range(CORPORA):
        tokens, length = texts(number)
        documents = corpus(number)
        arrays = params(build(documents, vocab_size=8))
        tree = propose(drafter, arrays, jnp.asarray(tokens), jnp.asarray(length))
        rows = [tokens[row, : length[row]].tolist() for row in range(TEXTS)]
        expected = [counted(drafter, documents, text) for text in rows]
        assert prefixes(drafter, tree, rows) == expected
        empty += sum(not paths for paths in expected)
        full += sum(len(paths) == drafter.num_nodes - 1 for paths in expected)
    assert empty > 5 or drafter.shortest_query == 1
    assert full > 5 or drafter.max_drafted > 30


def test_the_longest_query_and_the_largest_ids_there_may_be():
    # The first of thirty tokens is where the two differ.
    shared, first, largest = [number % 7 for number in range(29)], 70_000, 2**31 - 2
    documents = [[first, *shared, largest], [first + 1, *shared, 65_536]] + [[9, *shared, 20]] * 2
    drafter = Retrieval(longest_query=30, num_tokens=2)
    rows = [[one, *shared] for one in (first, first + 1, 9, first - 65_536)]
    expected = [[(largest,)], [(65_536,)], [(20,)], [(20,), (65_536,), (largest,)]]
    arrays = params(build(documents, vocab_size=2**31 - 1))
    tree = propose(drafter, arrays, jnp.asarray(rows), jnp.full(len(rows), 30))
    assert prefixes(drafter, tree, rows) == expected


def test_sizes_follow_from_the_settings():
    drafter = Retrieval()
    assert (drafter.num_nodes, drafter.max_depth, drafter.num_probes) == (65, 10, 0)
    assert Retrieval(num_tokens=3, max_matches=2).num_nodes == 7, "more can never be drafted"
    assert not drafter.taps.hidden_layers
    assert retrieval.SORTED_TOKENS == datastore_module.SORTED_TOKENS


@pytest.mark.parametrize(
    "settings, field",
    [
        ({"longest_query": 3, "shortest_query": 4}, "shortest_query"),
        ({"num_tokens": 17}, "num_tokens"),
        ({"longest_query": 30, "num_tokens": 3}, "num_tokens"),
    ],
)
def test_settings_that_do_not_fit_together_are_rejected(settings, field):
    with pytest.raises(SettingError) as error:
        Retrieval(**settings)
    assert error.value.field == field


ROW = jnp.zeros(3, jnp.int32)


@pytest.mark.parametrize(
    "given",
    [
        {"tokens": ROW},
        {"tokens": ROW, "suffixes": ROW.astype(jnp.int8)},
        {"tokens": ROW, "suffixes": ROW[:0]},
        {"tokens": [0, -1], "suffixes": [0]},
        None,
    ],
)
def test_params_that_are_not_a_datastore_are_rejected(given):
    with pytest.raises(SpecjaxError, match="REST needs the params of a datastore; build one with"):
        Retrieval().check(MODEL, given)


def test_ids_outside_the_vocabulary_are_rejected_where_they_are_known():
    check = partial(Retrieval().check, MODEL)
    check(params(build([[1, 39]], 40)))
    wrong = params(build([[1, 40], [7]], 50))
    for run in (lambda: check(wrong), jax.jit(lambda: check(wrong))):
        with pytest.raises(SpecjaxError, match=r"id 40, outside the target's vocabulary of 40;"):
            run()
    jax.jit(lambda arrays: check(arrays))(wrong)  # traced: taken on trust
