"""Trees from one distribution per depth: against trees written down node by node."""

from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.settings import SettingError
from specjax.decoding.drafter import Context
from specjax.decoding.drafters._trees import MEDUSA_TREE, DepthTreeDrafter
from specjax.decoding.sampling import Draw, Sampling, sequence_keys
from tests.decoding.test_head_trees import found_paths
from tests.decoding.test_tree import assert_well_formed

BATCH, DEPTHS, VOCABULARY, LENGTH = 2, 3, 7, 5
LOGITS = np.asarray(2 * jax.random.normal(jax.random.key(3), (BATCH, DEPTHS, VOCABULARY)))
CONTEXT = Context(
    jnp.arange(2 * LENGTH).reshape(BATCH, LENGTH) % VOCABULARY, jnp.full(BATCH, LENGTH)
)
CHOICES = ((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0), (2, 0, 0), (2, 0, 1))
SAMPLED = Sampling(temperature=0.8, top_p=0.9)
REJECTION = Sampling(temperature=0.8, top_p=0.9, verification="rejection")


@dataclass(frozen=True)
class Given(DepthTreeDrafter):
    """A head with constant logits."""

    head: None = None
    num_depths = DEPTHS

    def propose(self, target, params, state, context, draw):
        raise NotImplementedError


@partial(jax.jit, static_argnums=(0, 1))
def made(drafter: Given, sampling: Sampling, logits=LOGITS):
    """The tree of these logits, the noise of each depth, and the filtered laws."""
    draw = Draw(sequence_keys(jax.random.key(0), BATCH), CONTEXT.length, sampling)
    noise = draw.noise(CONTEXT.length[:, None] + jnp.arange(DEPTHS)[None], VOCABULARY)
    return drafter.tree_of(jnp.asarray(logits), CONTEXT, draw), noise, draw.filtered(logits)


def tree_of(drafter: Given, sampling: Sampling, logits=LOGITS):
    tree, noise, filtered = jax.device_get(made(drafter, sampling, logits))
    assert_well_formed(tree)
    return tree, noise, filtered


def test_a_dynamic_tree_is_the_most_likely_paths():
    share, drafter = 0.8, Given(tree="dynamic", top_k=3, num_tokens=12, noise_share=0.8)
    tree, noise, filtered = tree_of(drafter, SAMPLED)
    softmax = lambda x: np.exp(x) / np.exp(x).sum()  # noqa: E731
    for row in range(BATCH):
        laws = []
        for blind, heard, own in zip(LOGITS[row], noise[row], filtered[row], strict=True):
            seeing = blind + SAMPLED.temperature * (heard - 2.0 * np.isinf(own))
            laws.append(share * softmax(seeing) + (1 - share) * softmax(blind))
        likely = {
            path: np.prod([laws[d][token] for d, token in enumerate(path)])
            for count in range(1, DEPTHS + 1)
            for path in product(*(np.argsort(-law)[:3].tolist() for law in laws[:count]))
        }
        best = sorted(likely, key=lambda path: -likely[path])[:11]
        assert set(found_paths(tree, row)) == set(best)


def best_first(laws: np.ndarray, count: int) -> list[tuple[float, tuple[int, ...]]]:
    """The most likely paths, popped from a heap that holds their next siblings and children."""
    order = np.argsort(-laws, axis=-1, kind="stable")
    ranked = np.log(np.take_along_axis(laws, order, axis=-1))
    heap = [(-ranked[0, 0], (0,))]
    popped = []
    while len(popped) < count:
        score, path = heappop(heap)
        popped.append((-score, tuple(int(order[d, rank]) for d, rank in enumerate(path))))
        last, depth = path[-1], len(path)
        if last + 1 < laws.shape[1]:
            sibling = score + ranked[depth - 1, last] - ranked[depth - 1, last + 1]
            heappush(heap, (sibling, (*path[:-1], last + 1)))
        if depth < len(laws):
            heappush(heap, (score - ranked[depth, 0], (*path, 0)))
    return popped


@pytest.mark.parametrize("has_ties", [False, True])
def test_a_dynamic_tree_of_all_tokens_is_that_of_a_heap(has_ties):
    """Paths that tie for the last places may differ, but never without their parents."""
    drafter = Given(tree="dynamic", top_k=VOCABULARY, num_tokens=17)
    for number in range(20):
        logits = 2 * jax.random.normal(jax.random.key(number), (BATCH, DEPTHS, VOCABULARY))
        logits = jnp.round(logits) if has_ties else logits
        tree, laws = tree_of(drafter, Sampling(), logits)[0], np.float64(jax.nn.softmax(logits))
        for row in range(BATCH):
            paths = found_paths(tree, row)
            popped = best_first(laws[row], len(paths))
            scores = [sum(np.log(laws[row, d, token]) for d, token in enumerate(p)) for p in paths]
            assert len(set(paths)) == len(paths) == 16
            np.testing.assert_allclose(
                np.sort(scores)[::-1], [each[0] for each in popped], rtol=1e-5
            )
            np.testing.assert_allclose(tree.scores[row, 1:], scores, rtol=1e-5)
            assert has_ties or {path for _, path in popped} == set(paths)


def test_drawn_siblings_are_distinct_and_carry_the_distribution_of_their_depth():
    tree, _, filtered = tree_of(Given(choices=CHOICES), REJECTION)
    law = np.exp(filtered)
    for row in range(BATCH):
        paths = [(), *found_paths(tree, row)]
        assert len(set(paths)) == len(paths)
        for node, path in enumerate(paths):
            if any(other[:-1] == path for other in paths[1:]):  # it has children
                np.testing.assert_allclose(
                    tree.draft_probs[row, node], law[row, len(path)], rtol=1e-6
                )
            assert all(law[row, depth, token] > 0 for depth, token in enumerate(path))


def test_children_are_drawn_from_the_distribution_without_replacement():
    draws = 4000
    keys = jax.random.split(jax.random.key(5), draws)
    drafter = Given(choices=((0,), (1,), (0, 0)))

    def first_two(key):
        draw = Draw(key[None], CONTEXT.length[:1], REJECTION)
        context = Context(CONTEXT.tokens[:1], CONTEXT.length[:1])
        tree = drafter.tree_of(jnp.asarray(LOGITS[:1]), context, draw)
        return tree.tokens[0, 1:3], tree.tokens[0, 3]

    (pairs, below) = jax.jit(jax.vmap(first_two))(keys)
    law = np.exp(np.asarray(REJECTION.filtered(jnp.asarray(LOGITS[0]))))
    for tokens, depth in ((pairs[:, 0], 0), (below, 1)):
        found = np.bincount(np.asarray(tokens), minlength=VOCABULARY) / draws
        np.testing.assert_allclose(found, law[depth], atol=0.04)
    first, second = np.asarray(pairs).T
    likeliest = int(np.argmax(law[0]))
    others = np.where(np.arange(VOCABULARY) == likeliest, 0, law[0])
    after = np.bincount(second[first == likeliest], minlength=VOCABULARY)
    np.testing.assert_allclose(after / after.sum(), others / others.sum(), atol=0.06)


def test_choices_deeper_than_the_head_are_left_out():
    assert len(MEDUSA_TREE) == 63
    assert (Given().max_depth, Given().num_nodes) == (3, 62)
    chain = Given(tree="dynamic", top_k=1, num_tokens=3)
    assert (chain.max_depth, chain.num_nodes) == (2, 3)
    assert tree_of(chain, Sampling())[0].is_chain


@pytest.mark.parametrize(
    ("name", "value"), [("top_k", 3), ("num_tokens", 26), ("depth", 2), ("noise_share", 0.0)]
)
def test_a_static_tree_rejects_settings_of_a_dynamic_one(name, value):
    with pytest.raises(SettingError, match="static tree; add tree=dynamic") as error:
        Given(**{name: value})
    assert error.value.field == name
    dynamic = Given(choices=CHOICES, tree="dynamic", **{name: value})  # choices may be tuned ones
    assert getattr(dynamic, name) == value
    default = getattr(Given(), name)
    assert Given(choices=CHOICES, **{name: default}) == Given(choices=CHOICES)
