"""Trees from one distribution per depth: against trees written down node by node."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.decoding.drafters._trees import MEDUSA_TREE, TreeSettings, depth_tree

from specjax.core.errors import SpecjaxError
from specjax.decoding.drafter import Context
from specjax.decoding.drafters.parallel_spec import ParallelSettings
from specjax.decoding.sampling import Draw, Sampling, row_keys

BATCH, DEPTHS, VOCABULARY, LENGTH = 2, 3, 7, 5
LOGITS = 2 * jax.random.normal(jax.random.key(3), (BATCH, DEPTHS, VOCABULARY))
CONTEXT = Context(
    jnp.arange(2 * LENGTH).reshape(BATCH, LENGTH) % VOCABULARY, jnp.full(BATCH, LENGTH)
)
CHOICES = ((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0), (2, 0, 0), (2, 0, 1))
SAMPLED = Sampling(temperature=0.8, top_p=0.9)
REJECTION = Sampling(temperature=0.8, top_p=0.9, verification="rejection")


def tree_of(settings: TreeSettings, sampling: Sampling, key: int = 0):
    keys = row_keys(jax.random.key(key), BATCH)
    draw = Draw(keys, CONTEXT.length, sampling)
    return jax.device_get(depth_tree(settings, LOGITS, CONTEXT, draw)), draw


def paths_of(tree, row: int) -> list[tuple[int, ...]]:
    """The tokens below the root of every valid node."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, tree.num_nodes):
        parent = tree.parents[row, node]
        assert parent < node
        paths.append((*paths[parent], int(tree.tokens[row, node])))
        assert tree.depth[row, node] == len(paths[-1])
    valid = tree.valid[row]
    assert list(valid) == sorted(valid, reverse=True), "valid nodes stand in front"
    return [path for path, is_valid in zip(paths, valid, strict=True) if is_valid]


def scores_of(draw: Draw, depth: int, row: int) -> np.ndarray:
    """The greedy scores, or what the target would draw at temperature T if it had these logits."""
    logits = np.asarray(LOGITS[row, depth], np.float64)
    if draw.sampling.is_greedy:
        return logits
    temperature = draw.sampling.temperature
    noise = np.asarray(draw.noise(CONTEXT.length[:, None] + depth, VOCABULARY))[row, 0]
    cut = np.isinf(np.asarray(draw.filtered(LOGITS[:, depth])))[row]
    return logits + temperature * noise - 2.0 * temperature * cut


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_the_static_tree_is_the_best_tokens_of_each_depth(sampling):
    tree, draw = tree_of(TreeSettings(CHOICES), sampling)
    for row in range(BATCH):
        best = [np.argsort(-scores_of(draw, depth, row)) for depth in range(DEPTHS)]
        expected = {tuple(best[d][rank] for d, rank in enumerate(c)) for c in CHOICES} | {()}
        assert set(paths_of(tree, row)) == expected
        assert tree.tokens[row, 0] == CONTEXT.root[row]


@pytest.mark.parametrize("share", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_the_dynamic_tree_is_the_most_likely_paths(sampling, share):
    settings = TreeSettings(tree="dynamic", top_k=3, num_tokens=12, noise_share=share)
    tree, draw = tree_of(settings, sampling)
    for row in range(BATCH):
        laws = []
        for depth in range(DEPTHS):
            scores = scores_of(draw, depth, row)
            blind = np.asarray(LOGITS[row, depth], np.float64)
            seeing, blind = (np.exp(x) / np.exp(x).sum() for x in (scores, blind))
            weight = 0.0 if sampling.is_greedy else share
            laws.append(weight * seeing + (1 - weight) * blind)
        likely = {
            path: np.prod([laws[d][token] for d, token in enumerate(path)])
            for count in range(1, DEPTHS + 1)
            for path in product(*(np.argsort(-law)[:3].tolist() for law in laws[:count]))
        }
        best = sorted(likely, key=lambda path: -likely[path])[:11]
        assert set(paths_of(tree, row)) == {(), *best}


def test_drawn_siblings_are_distinct_and_carry_their_law():
    """Row n of the proposal is what the children of node n were drawn from: that of their depth."""
    tree, draw = tree_of(TreeSettings(CHOICES), REJECTION)
    law = np.exp(np.asarray(draw.filtered(LOGITS)))
    for row in range(BATCH):
        paths = paths_of(tree, row)
        assert len(set(paths)) == len(paths)
        for node, path in enumerate(paths):
            has_children = any(other[:-1] == path for other in paths if other)
            if has_children:
                np.testing.assert_allclose(tree.proposal[row, node], law[row, len(path)], rtol=1e-6)
            for depth, token in enumerate(path):
                assert law[row, depth, token] > 0


def test_first_children_are_drawn_from_the_law():
    draws = 4000
    keys = jax.random.split(jax.random.key(5), draws)
    settings = TreeSettings(((0,), (1,), (0, 0)))

    def first_two(key):
        draw = Draw(key[None], CONTEXT.length[:1], REJECTION)
        context = Context(CONTEXT.tokens[:1], CONTEXT.length[:1])
        tree = depth_tree(settings, LOGITS[:1], context, draw)
        return tree.tokens[0, 1:3], tree.tokens[0, 3]

    (pairs, below) = jax.vmap(first_two)(keys)
    law = np.exp(np.asarray(REJECTION.filtered(LOGITS[0])))
    for tokens, depth in ((pairs[:, 0], 0), (below, 1)):
        found = np.bincount(np.asarray(tokens), minlength=VOCABULARY) / draws
        np.testing.assert_allclose(found, law[depth], atol=0.04)
    first, second = np.asarray(pairs).T
    likeliest = int(np.argmax(law[0]))
    others = np.where(np.arange(VOCABULARY) == likeliest, 0, law[0])
    after = np.bincount(second[first == likeliest], minlength=VOCABULARY)
    np.testing.assert_allclose(after / after.sum(), others / others.sum(), atol=0.06)


def test_nodes_that_filters_leave_no_token_for_are_not_valid():
    sure = Sampling(temperature=0.5, top_k=2, verification="rejection")
    tree, _ = tree_of(TreeSettings(CHOICES), sure)
    kept = sum(max(choice) < 2 for choice in CHOICES)
    np.testing.assert_array_equal(tree.num_valid(), np.full(BATCH, kept + 1))


def test_choices_deeper_than_the_head_are_left_out():
    settings = TreeSettings()
    assert (settings.max_depth(5), settings.num_nodes(5)) == (4, 64)
    assert (settings.max_depth(3), settings.num_nodes(3)) == (3, 62)
    assert len(MEDUSA_TREE) == 63
    chain = TreeSettings(tree="dynamic", top_k=1, num_tokens=3)
    assert (chain.max_depth(5), chain.num_nodes(5)) == (2, 3)
    assert tree_of(chain, Sampling())[0].is_chain


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"choices": ()}, "no tree choices"),
        ({"choices": ((1,),)}, "better sibling"),
        ({"tree": "wide"}, "unknown"),
        ({"top_k": 0}, "top_k 0"),
        ({"num_tokens": 1}, "num_tokens 1"),
        ({"noise_share": 1.5}, "outside"),
    ],
)
def test_settings_that_draft_nothing_are_refused(settings, reason):
    with pytest.raises(SpecjaxError, match=reason):
        TreeSettings(**settings)


@pytest.mark.parametrize(
    ("name", "value"), [("top_k", 3), ("num_tokens", 26), ("depth", 2), ("noise_share", 0.0)]
)
def test_a_static_tree_refuses_what_only_a_dynamic_one_reads(name, value):
    with pytest.raises(SpecjaxError, match=f"^{name} {value} .* static tree; add tree=dynamic"):
        ParallelSettings(**{name: value})
    for settings in (TreeSettings, ParallelSettings):  # whose choices may be tuned ones
        assert getattr(settings(CHOICES, "dynamic", **{name: value}), name) == value
    default = getattr(TreeSettings(), name)
    assert TreeSettings(CHOICES, "static", **{name: default}) == TreeSettings(CHOICES)


def test_more_children_than_tokens_are_refused():
    with pytest.raises(SpecjaxError, match="only 7 tokens"):
        TreeSettings().check(VOCABULARY)
