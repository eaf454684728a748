"""EAGLE: its trees against their definition, their law, and its settings."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.decoding.drafters._trees import CUT_SETBACK, Choices

from specjax.core.errors import SpecjaxError
from specjax.decoding.drafter import Proposal
from specjax.decoding.drafters.eagle import PUBLISHED_TREE, Eagle, EagleSettings
from specjax.decoding.sampling import Draw, Sampling
from specjax.decoding.tree import DraftTree
from tests.decoding.heads import TREE, Literal, first_trees, head, params_of
from tests.decoding.test_distribution import SAMPLING, VOCAB, p_value
from tests.decoding.test_tree import assert_well_formed, path_of
from tests.decoding.test_with_head import later_trees
from tests.decoding.tiny import prompt, target

BATCH = 3
KEY = jax.random.key(2)
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.8, top_k=9, top_p=0.9),
    "rejection": Sampling(temperature=0.8, top_k=2, verification="rejection"),
}


def drafter(choices: Choices = TREE, vocab_size: int = 40, layers: int = 2) -> Eagle:
    own = head(vocab_size, layers)[0], target(vocab_size, layers)[0]
    return Eagle(*own, EagleSettings(choices))


@cache
def proposed(own: Eagle, sampling: Sampling) -> DraftTree:
    return first_trees(own, sampling, params_of(), prompt(BATCH), KEY)


# ---- the tree ----------------------------------------------------------------------------------


@pytest.mark.parametrize("choices", [TREE, PUBLISHED_TREE, ((0,), (0, 0), (0, 0, 0))])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_node_is_the_token_of_its_rank_below_its_parent(sampling, choices):
    settings, given = SAMPLINGS[sampling], prompt(BATCH)
    tree = proposed(drafter(choices), settings)
    assert_well_formed(tree)
    assert tree.is_chain == (len(choices) == 3)
    for row in range(BATCH):
        text = given.tokens[row, : given.length[row]].tolist()
        literal = Literal(params_of(), head()[0], target()[0], text)
        key = jax.random.fold_in(KEY, row)
        expected, laws = expanded(choices, settings, literal, key)
        nodes = [path_of(tree, row, node)[1:] for node in range(1, int(tree.valid[row].sum()))]
        assert found_paths(tree, row) == expected
        if sampling != "rejection":
            assert tree.valid[row].all() and tree.proposal is None
            continue
        for path in nodes:  # what each node says that it was drawn from
            *above, token = tree.tokens[row, path].tolist()
            assert tree.proposal is not None
            told = tree.proposal[row, tree.parents[row, path[-1]]]
            np.testing.assert_allclose(told, laws[tuple(above)], atol=1e-4)
            assert told[token] > 0


def found_paths(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    """The tokens from the root to each valid node."""
    nodes = [path_of(tree, row, node)[1:] for node in range(1, int(tree.valid[row].sum()))]
    return [tuple(tree.tokens[row, path].tolist()) for path in nodes]


def expanded(choices: Choices, sampling: Sampling, literal: Literal, key: jax.Array):
    """The paths of tokens by `choices`, one node at a time, and the law below every node."""
    length = jnp.array([len(literal.text)])
    paths: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
    laws: dict[tuple[int, ...], np.ndarray] = {}
    for choice in sorted(choices, key=lambda choice: (len(choice), choice)):
        if choice[:-1] not in paths:  # cannot be drawn
            continue
        path = paths[choice[:-1]]
        logits = literal.logits(path)
        scores, draw = np.asarray(logits), Draw(key[None], length, sampling)
        if sampling.temperature > 0:
            law = np.asarray(draw.filtered(logits))
            noise = np.asarray(draw.noise(length[:, None] + len(path), len(logits)))[0, 0]
            laws[path] = np.exp(law)
            scores = scores / sampling.temperature + noise - CUT_SETBACK * np.isneginf(law)
            if sampling.verification == "rejection":
                scores = law + noise
        ranked = np.argsort(-scores, kind="stable")
        if np.isfinite(scores[ranked[choice[-1]]]):
            paths[choice] = (*path, int(ranked[choice[-1]]))
    return [path for choice, path in paths.items() if choice], laws


def test_trees_in_the_middle_of_a_text_are_right_too():
    for row, literal, tree in later_trees("eagle"):
        expected, _ = expanded(TREE, Sampling(), literal, KEY)
        assert found_paths(tree, row) == expected


def test_some_tokens_of_a_drawn_tree_cannot_be_drawn():
    counts = proposed(drafter(), SAMPLINGS["rejection"]).num_valid()
    assert (counts > 1).all() and (counts < len(TREE) + 1).any()


def test_the_published_tree_has_25_nodes_and_15_leaves():
    own = drafter(PUBLISHED_TREE)
    assert own == Eagle(own.head, own.target) == EagleSettings().build(own.head, own.target)
    assert (own.num_nodes, own.max_depth, own.num_fed) == (26, 5, 10)
    depths = np.bincount([len(choice) for choice in PUBLISHED_TREE])
    assert depths.tolist() == [0, 4, 8, 8, 3, 2]
    parents = {choice[:-1] for choice in PUBLISHED_TREE}
    assert len(set(PUBLISHED_TREE) - parents) == 15
    assert hash(own) == hash(drafter(PUBLISHED_TREE))


# ---- rejection ---------------------------------------------------------------------------------


FEW: Choices = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0))


def test_drawn_trees_keep_the_law():
    assert p_value(drafter(FEW, VOCAB, layers=1), head(VOCAB, 1)[1]) > 1e-3


def test_coupled_trees_keep_the_law_too():
    sampling = replace(SAMPLING, verification="coupled")
    assert p_value(drafter(FEW, VOCAB, layers=1), head(VOCAB, 1)[1], sampling) > 1e-3


class Lying(Eagle):
    """Claims a law that its tokens were not drawn from."""

    def propose(self, params, state, context, draw):
        (tree, _), state = super().propose(params, state, context, draw)
        assert tree.proposal is not None
        return Proposal(replace(tree, proposal=jnp.full_like(tree.proposal, 1 / VOCAB))), state


def test_a_lie_about_what_was_drawn_breaks_it():
    own = drafter(FEW, VOCAB, layers=1)
    assert p_value(Lying(own.head, own.target, own.settings), head(VOCAB, 1)[1]) < 1e-6


# ---- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "choices, message",
    [
        ((), "there are no tree choices: nothing would be drafted"),
        (((0,), ()), r"tree choice \(\) is no path"),
        (((0,), (0, 0, 0)), r"tree choice \(0, 0, 0\) has no parent; add \(0, 0\) to the choices"),
        (
            ((0,), (2,)),
            r"tree choice \(2,\) leaves out its better sibling; add \(1,\) to the choices",
        ),
    ],
)
def test_choices_that_are_no_tree_are_refused(choices, message):
    with pytest.raises(SpecjaxError, match=message) as caught:
        EagleSettings(choices)
    assert "\n" not in str(caught.value)


def test_more_children_than_tokens_are_refused():
    with pytest.raises(SpecjaxError, match="41 children of one node, but the target has only 40"):
        drafter(tuple((rank,) for rank in range(41)))
