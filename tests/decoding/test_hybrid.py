"""Hybrid: the merged tree, the share of each part, and parts that follow the other's paths."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import Context, DraftTree, Engine, Outcome, Params, chain
from specjax.decoding.drafters import hybrid
from specjax.decoding.drafters.draft_model import DraftModel
from specjax.decoding.drafters.hybrid import Hybrid, HybridState, log_rates
from specjax.decoding.drafters.length_rules import Fixed
from specjax.decoding.drafters.lookahead import Lookahead
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.tree import NO_PARENT, Verification
from specjax.models.target import ModelOutput
from tests.decoding.contract import assert_lossless, assert_params_rejected, whole_texts
from tests.decoding.heads import EAGLE2, END
from tests.decoding.rounds import Round, rounds_of, some_path
from tests.decoding.test_head_state import assert_of_text
from tests.decoding.test_head_trees import found_paths
from tests.decoding.test_tree import assert_well_formed
from tests.decoding.tiny import Oracle, slow_except, target

BOTH = {"copy": None, "head": None}


def random_tree(numbers: np.random.Generator, num_nodes: int) -> tuple[DraftTree, jax.Array]:
    """One tree below the root 0, its siblings distinct, and scores that fall along its paths."""
    tokens, parents, depth, scores = [0], [NO_PARENT], [0], [0.0]
    while len(tokens) < num_nodes:
        parent, token = (int(numbers.integers(end)) for end in (len(tokens), 3))
        siblings = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        if token not in siblings:
            tokens.append(token)
            parents.append(parent)
            depth.append(depth[parent] + 1)
            scores.append(scores[parent] - numbers.uniform(0.1, 1))
    valid = np.arange(num_nodes) < numbers.integers(1, num_nodes + 1)
    arrays = (jnp.asarray([each]) for each in (tokens, parents, depth, valid))
    return DraftTree(*arrays), jnp.array([scores])


def test_a_merged_tree_holds_the_best_nodes_of_both_and_each_only_once():
    numbers, num_shared = np.random.default_rng(0), 0
    merge = jax.jit(hybrid.merge_trees, static_argnums=4)
    for _ in range(40):
        given = jax.device_get([random_tree(numbers, size) for size in (9, 12)])
        best: dict[tuple[int, ...], float] = {}
        for tree, scores in given:
            for path, score in zip([(), *found_paths(tree, 0)], scores[0], strict=False):
                num_shared += path in best
                best[path] = max(best.get(path, -np.inf), float(score))
        trees, scores = zip(*given, strict=True)
        merged = jax.device_get(merge(*trees, *scores, 8))
        assert_well_formed(merged)
        found = [(), *found_paths(merged, 0)]
        wanted = sorted(best, key=lambda path: -best[path])[:8]
        assert len(set(found)) == len(found) and set(found) == set(wanted)
    assert num_shared > 50


def test_paths_deeper_than_the_merged_tree_are_compared_up_to_the_root():
    """The second part is certain of all that follows its first token."""
    root, count = jnp.array([0]), jnp.array([5])
    parts = [chain(root, jnp.array([[first, 1, 1, 1, 1]]), count) for first in (1, 2)]
    scores = jnp.array([[0.0, -1, -2, -3, -4, -5]]), jnp.zeros((1, 6))
    merged = jax.device_get(hybrid.merge_trees(*parts, *scores, num_nodes=4))
    assert_well_formed(merged)
    assert {*found_paths(merged, 0)} == {(2,), (2, 1), (2, 1, 1)}


def test_nodes_beyond_its_tokens_are_verified_only_if_they_are_likely():
    numbers, counts = np.random.default_rng(0), set()
    cut = jax.jit(hybrid.without_unlikely, static_argnums=1)
    for _ in range(40):
        tree, scores = random_tree(numbers, 8)
        tree = replace(tree, scores=scores / 3)
        kept = jax.device_get(cut(tree, 4))
        ranked = sorted(tree.scores[0][tree.valid[0]].tolist(), reverse=True)
        is_likely = sum(np.exp(ranked[4:])) / 4 >= hybrid.LIKELY
        count = int(kept.valid.sum())
        assert kept.valid[0].tolist() == [True] * count + [False] * (8 - count)
        wanted = ranked if is_likely else ranked[:4]
        assert sorted(kept.scores[0, :count].tolist(), reverse=True) == wanted
        assert {*found_paths(kept, 0)} <= {*found_paths(tree, 0)}
        counts.add(count)
    assert 4 in counts and max(counts) > 4


def test_the_budget_goes_to_the_part_that_was_right():
    right = whole_texts("greedy", 3)
    drafter = Hybrid(Oracle(max_depth=6), Oracle(max_depth=6), num_tokens=7)
    for parts in ((right, (right + 1) % 40), ((right + 1) % 40, right)):
        known = dict(zip(("copy", "head"), parts, strict=True))
        found = assert_lossless(drafter, known, new_tokens=70, case=("greedy", 3, False))
        counts = found.stats.accepted_lengths
        assert (counts[:, 7] >= 7).all(), "nearly all rounds accept six tokens of the right part"


@pytest.mark.parametrize("is_sure", slow_except((False, True), True))
def test_a_head_follows_paths_that_were_copied(is_sure):
    """Also in rounds that skip it, as its expected gain is below its cost."""
    copy = PromptLookup(min_ngram=1, num_tokens=7, allow_shorter=True)
    texts = None
    if is_sure:
        copy, texts = Oracle(max_depth=7), whole_texts("greedy", 3)
    params = EAGLE2.request._replace(drafter={"copy": texts, "head": EAGLE2.params})
    engine = Engine(target()[0], Hybrid(copy, EAGLE2.drafter), max_new_tokens=60, eos=END)
    played = rounds_of(engine, params, verify=None if is_sure else some_path)
    for state in [played[0].before, *(each.after for each in played)]:
        assert_of_text(EAGLE2, state, state.drafter.parts[1], max_depth=7)
    heads = [each.after.drafter.parts[1].num_pending.max() for each in played]
    assert max(heads) > EAGLE2.drafter.max_depth + 1, "no long copy was ever accepted"
    drafts, pays = [], []
    for played_round in played[:-1]:
        goes_on = ~played_round.before.is_done
        drafts.extend((played_round.proposed.drafted[1].num_valid() > 1)[goes_on])
        pays.extend(head_pays(played_round, engine.drafter.head_cost)[goes_on])
    np.testing.assert_array_equal(drafts, pays)
    assert {*pays} == {True, False}


def head_pays(played: Round, head_cost: float) -> np.ndarray:
    """Whether a copy fails so often that the head's first token is worth its cost."""
    state, proposed = played.before.drafter, played.proposed
    right, wrong = state.right + hybrid.PRIOR_RIGHT, state.wrong + hybrid.PRIOR_WRONG
    short, long, later = np.moveaxis((right / (right + wrong))[:, 0], -1, 0)
    first = np.where(proposed.has_long_match[:, 0], long, short)
    depth = np.where(proposed.drafted[0].valid, proposed.drafted[0].depth, 0).max(axis=1)
    copied = [rate * sum(later[b] ** np.arange(depth[b])) for b, rate in enumerate(first)]
    num_right, num_wrong = (counts[:, 1] for counts in (state.right, state.wrong))
    drafts = (num_right + num_wrong)[:, :2].sum(axis=1)
    gain = (1 - first) * (1 + num_right.sum(axis=1)) / (1 + drafts)
    return (depth == 0) | (gain > head_cost * (1 + np.asarray(copied)))


def test_copies_of_long_matches_have_a_rate_of_their_own():
    """They are always right here, and those of short matches always wrong."""
    zeros = jnp.zeros((1, 2, 3))
    state = HybridState((None, None), (), zeros[..., 0] > 0, zeros, zeros, zeros[:, 0, 0] > 0)
    update = jax.jit(partial(Hybrid(Oracle(), Oracle()).update, target()[0]))
    chains = [chain(jnp.array([1]), jnp.array([[2, 3]]), jnp.array([count])) for count in (2, 0)]
    for is_right in (True, False, True, False):
        committed = jnp.array([[1, 2, 3, 4] if is_right else [1, 5, 0, 0]])
        context = Context(committed, jnp.array([4 if is_right else 2]))
        verification = Verification(jnp.zeros((1, 3), int), jnp.array([0]), jnp.array([0]))
        outcome = Outcome(chains[0], ModelOutput(None), verification, context, jnp.array([0]))
        is_long = jnp.array([[is_right, False]])
        state = replace(state, drafted=tuple(chains), has_long_match=is_long)
        state = update(Params(None, BOTH), state, outcome)
    short, long, later = np.exp(log_rates(state))[0, 0]
    assert short < 0.3 < 0.8 < long and later > 0.8
    np.testing.assert_allclose(np.exp(log_rates(state))[0, 1], [1 / 3, 3 / 4, 3 / 4])


@pytest.mark.slow
def test_a_draft_model_follows_paths_that_were_copied():
    """It is the target itself, so as long as it knows the text all that it drafts is right."""
    model, params = target()
    copy = Oracle(max_depth=6, vary_length=True)
    drafter = Hybrid(copy, DraftModel(model, Fixed(3), max_length=3))
    known = {"copy": whole_texts("sampled", 3), "head": {"draft": params, "rule": None}}
    found = assert_lossless(drafter, known, new_tokens=60, case=("sampled", 3, False))
    counts = found.stats.accepted_lengths
    assert (counts[:, :4].sum(axis=1) <= 1).all(), "only the last round may be cut"
    assert counts[:, 5:].sum() > 3, "copies beyond the drafts were accepted"


@pytest.mark.parametrize(
    "drafter, params, message",
    [
        (Hybrid(PromptLookup(), Lookahead()), BOTH, "Lookahead cannot be the head of a hybrid"),
        (Hybrid(), BOTH, "needs two drafters, not names"),
        (Hybrid(PromptLookup(), PromptLookup()), None, "the params of both its parts"),
    ],
)
def test_parts_that_cannot_be_merged_are_rejected(drafter, params, message):
    assert_params_rejected(drafter, params, message)
