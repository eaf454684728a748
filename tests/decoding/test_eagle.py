"""EAGLE through the real loop: its trees, what its head has seen, its passes, and its law."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import round as round_module
from specjax.decoding.drafter import Context, Params, Proposal
from specjax.decoding.drafters.eagle import (
    CUT_SETBACK,
    PUBLISHED_TREE,
    Choices,
    Eagle,
    EagleSettings,
)
from specjax.decoding.drafters.eagle2 import Eagle2, Eagle2Settings
from specjax.decoding.drafters.with_head import HeadDrafter
from specjax.decoding.generate import start_loop
from specjax.decoding.prompt import from_ids
from specjax.decoding.request import check_request
from specjax.decoding.round import one_round
from specjax.decoding.sampling import Draw, Sampling
from specjax.decoding.state import LoopState
from specjax.decoding.tree import DraftTree, Verification, ancestors
from specjax.drafting import load_drafter
from specjax.errors import SpecjaxError
from specjax.hub import Target
from specjax.models.heads.eagle import EagleHead
from specjax.models.heads.eagle_files import save_eagle
from specjax.models.llama import Llama
from specjax.tuned import fingerprint
from tests.decoding.heads import LONGEST, Literal, features_of, head, params_of, predicted
from tests.decoding.test_distribution import SAMPLING, VOCAB, p_value
from tests.decoding.test_tree import assert_well_formed, path_of
from tests.decoding.tiny import prompt, target

BATCH, NEW_TOKENS = 3, 60
KEY = jax.random.key(2)
TREE: Choices = (
    *((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (2, 1)),
    *((0, 1, 0), (2, 0, 0), (2, 0, 1), (2, 0, 2), (2, 0, 1, 0)),
)
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.8, top_k=9, top_p=0.9),
    "rejection": Sampling(temperature=0.8, top_k=2, verification="rejection"),
}


def drafter(choices: Choices = TREE, vocab_size: int = 40, layers: int = 2) -> Eagle:
    own = head(vocab_size, layers)[0], target(vocab_size, layers)[0]
    return Eagle(*own, EagleSettings(choices))


@cache
def proposed(own: HeadDrafter, sampling: Sampling) -> DraftTree:
    """The trees below the prompts, at the start of a generation."""
    given, batch, model = params_of(), prompt(BATCH), target()[0]
    state = start_loop(given, batch, KEY, target=model, drafter=own, max_new_tokens=8)
    context, draw = (
        Context(state.tokens, state.length),
        Draw(state.row_keys, state.length, sampling),
    )
    return jax.device_get(jax.jit(own.propose)(given, state.drafter, context, draw)[0].tree)


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
        count = int(tree.valid[row].sum())
        nodes = [path_of(tree, row, node)[1:] for node in range(1, count)]
        assert [tuple(tree.tokens[row, path].tolist()) for path in nodes] == expected
        if sampling != "rejection":
            assert tree.valid[row].all() and tree.proposal is None
            continue
        for path in nodes:  # what each node says that it was drawn from
            told, token = (
                tree.proposal[row, tree.parents[row, path[-1]]],
                tree.tokens[row, path[-1]],
            )
            np.testing.assert_allclose(
                told, laws[tuple(tree.tokens[row, path[:-1]].tolist())], atol=1e-4
            )
            assert told[token] > 0


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


# ---- passes ------------------------------------------------------------------------------------


CALLS: list[int] = []


class Counted(EagleHead):
    """Tells how many rows each of its passes has; nothing in `propose` runs conditionally."""

    @nn.nowrap
    def run(self, params, target_params, rows, features, cache):
        CALLS.append(rows.tokens.shape[1])
        return super().run(params, target_params, rows, features, cache)


def passes(own: HeadDrafter, batch: int) -> list[int]:
    """The rows of each pass of the head in one round."""
    own, given = replace(own, head=Counted(own.head.config)), params_of()
    settings = {"target": target()[0], "drafter": own, "max_new_tokens": 8}
    state = start_loop(given, prompt(batch), KEY, **settings)
    context, draw = (
        Context(state.tokens, state.length),
        Draw(state.row_keys, state.length, Sampling()),
    )
    CALLS.clear()
    jaxpr = jax.make_jaxpr(own.propose)(given, state.drafter, context, draw)
    assert not {"cond", "while", "scan"} & {str(equation.primitive) for equation in jaxpr.eqns}
    return list(CALLS)


@pytest.mark.parametrize(
    "choices, rows", [(TREE, [5, 3, 2, 1]), (PUBLISHED_TREE, [6, 4, 4, 1, 1]), (((0,), (1,)), [2])]
)
def test_a_round_takes_one_pass_to_catch_up_and_one_for_each_further_depth(choices, rows):
    assert passes(drafter(choices), BATCH) == rows


# ---- what the head has seen --------------------------------------------------------------------


DRAFTERS = {
    "eagle": drafter(),
    "eagle2": Eagle2(head()[0], target()[0], Eagle2Settings(3, 3, 12)),
}
END = 39


def some_path(tree, logits, draw, root_slot, max_depth) -> Verification:
    """Accepts a random number of tokens, those of the last valid node of that depth."""
    del logits, draw
    keys = jax.vmap(jax.random.fold_in, (None, 0))(KEY, root_slot)
    wanted = jax.vmap(lambda key: jax.random.randint(key, (), 0, max_depth + 1))(keys)
    fits = tree.valid & (tree.depth <= wanted[:, None])
    deepest = jnp.max(jnp.where(fits, tree.depth, 0), axis=1)
    last = (
        tree.num_nodes - 1 - jnp.argmax((fits & (tree.depth == deepest[:, None]))[:, ::-1], axis=1)
    )
    above = jnp.take_along_axis(ancestors(tree, max_depth), last[:, None, None], axis=1)[:, 0]
    at = above[:, None] & (tree.depth[:, None] == jnp.arange(max_depth + 1)[None, :, None])
    bonus = (root_slot * 11 + jnp.arange(BATCH)) % 20
    return Verification(jnp.argmax(at, axis=2), deepest, bonus)


class Round(NamedTuple):
    before: LoopState
    after: LoopState


@cache
def rounds(name: str) -> list[Round]:
    """All rounds of a generation in which paths of all lengths are accepted."""
    own, model, given = DRAFTERS[name], target()[0], params_of()
    settings = {"target": model, "drafter": own, "max_new_tokens": NEW_TOKENS}
    right, round_module.verify = round_module.verify, some_path
    try:
        step = jax.jit(
            lambda state: one_round(given, state, model, own, Sampling(), NEW_TOKENS, (END,))
        )
        state, found = start_loop(given, prompt(BATCH), KEY, **settings), []
        while not state.is_done.all():
            after = step(state)
            found.append(jax.device_get(Round(state, after)))
            state = after
        found.append(jax.device_get(Round(state, step(state))))
    finally:
        round_module.verify = right
    return found


@pytest.mark.parametrize("name", DRAFTERS)
def test_paths_of_all_lengths_are_accepted_and_rows_end_at_different_times(name):
    whole = rounds(name)
    counts = np.array([found.after.length - found.before.length for found in whole])
    assert set(counts.flat) == set(range(DRAFTERS[name].max_depth + 2))
    done = np.array([found.after.is_done for found in whole])
    assert len({*done.sum(axis=0).tolist()}) > 1
    ends = whole[-1].after.tokens[np.arange(BATCH), whole[-1].after.length - 1] == END
    assert ends.any() and not ends.all(), "cut by EOS, and by max_new_tokens"


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_cache_and_the_pending_features_are_those_of_the_committed_text(name):
    model, module = target()[0], head()[0]
    start = rounds(name)[0].before
    for state in [start, *(found.after for found in rounds(name))]:
        tokens = np.zeros((BATCH, LONGEST), np.int32)
        for row, length in enumerate(state.length):
            tokens[row, :length] = state.tokens[row, :length]
        features = features_of(params_of(), jnp.asarray(tokens), model)
        _, fresh = predicted(params_of(), jnp.asarray(tokens), features, module)
        own = state.drafter
        np.testing.assert_array_equal(own.cache.length + own.num_pending, state.length - 1)
        for row, held in enumerate(own.cache.length):
            count = own.num_pending[row]
            pending = own.pending[row, :count]
            np.testing.assert_allclose(pending, features[row, held : held + count], atol=1e-5)
            np.testing.assert_array_equal(own.cache.positions[row, :held], np.arange(held))
            for mine, its in zip(
                own.cache.keys + own.cache.values, fresh.keys + fresh.values, strict=True
            ):
                np.testing.assert_allclose(mine[row, :, :held], its[row, :, :held], atol=1e-5)


@pytest.mark.parametrize("name", DRAFTERS)
def test_finished_rows_keep_still(name):
    still = 0
    for found in rounds(name):
        before, after = found.before.drafter, found.after.drafter
        for row in np.flatnonzero(found.before.is_done):
            assert after.num_pending[row] == 0
            held = found.before.length[row] - 1
            assert after.cache.length[row] == held
            if before.cache.length[row] == held:  # it had caught up
                still += 1
                mine, its = before.cache.keys[0][row, :, :held], after.cache.keys[0][row, :, :held]
                np.testing.assert_array_equal(mine, its)
    assert still > 0


def test_a_long_prompt_is_taken_in_by_chunks():
    model, module, own = target()[0], head()[0], DRAFTERS["eagle2"]
    numbers = np.random.default_rng(3)
    texts = [numbers.integers(0, 40, count).tolist() for count in (300, 2, 130)]
    given = from_ids(texts, bucket=50)
    settings = {"target": model, "drafter": own, "max_new_tokens": 8}
    state = start_loop(params_of(), given, KEY, **settings).drafter
    features = features_of(params_of(), given.tokens, model)
    _, fresh = predicted(params_of(), given.tokens, features, module)
    np.testing.assert_array_equal(state.cache.length, [298, 0, 128])
    np.testing.assert_array_equal(state.num_pending, [1, 1, 1])
    for row, held in enumerate([298, 0, 128]):
        np.testing.assert_allclose(state.pending[row, 0], features[row, held], atol=1e-5)
        for mine, its in ((state.cache.keys, fresh.keys), (state.cache.values, fresh.values)):
            np.testing.assert_allclose(mine[0][row, :, :held], its[0][row, :, :held], atol=1e-5)


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


# ---- settings and params -----------------------------------------------------------------------


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


@cache
def tiny() -> Target:
    model, params = target()
    return Target(model, params, None, model.config, "tiny")


def save(folder: Path, about: dict | None = None) -> Path:
    config = target()[0].config
    save_eagle(folder, *head(), jnp.float32, target=config, about=about)
    return folder


@pytest.mark.parametrize("method", ["eagle", "eagle2", "hass"])
def test_a_head_in_a_folder_becomes_a_drafter(method, tmp_path):
    owner = fingerprint(tiny().config, tiny().params)
    given = {"eagle": {"choices": TREE}}.get(method, {"num_tokens": 12, "sees_noise": False})
    folder = save(tmp_path / "head", {"target": owner})
    own, params = load_drafter(method, tiny(), folder, **given)
    kind, settings = (Eagle, EagleSettings) if method == "eagle" else (Eagle2, Eagle2Settings)
    assert type(own) is kind and own == settings(**given).build(own.head, tiny().model)
    assert own.head.config == head()[0].config
    jax.tree.map(np.testing.assert_array_equal, params, head()[1])


def test_without_a_head_of_the_target_there_is_no_drafter(tmp_path):
    def fails(message, *source, **settings):
        with pytest.raises(SpecjaxError, match=message) as caught:
            load_drafter("eagle2", tiny(), *source, **settings)
        assert "\n" not in str(caught.value)

    fails("method 'eagle2' needs an EAGLE head; name a folder or a hub id")
    fails("no-such-head.* is no head", tmp_path / "no-such-head")
    fails("holds no config.json; give the folder of an EAGLE head", tmp_path)
    stranger = save(tmp_path / "stranger", {"target": "another"})
    fails("this head was trained for target another, but this one is", stranger)
    fails("top_k 41 exceeds the target's vocabulary", save(tmp_path / "head"), top_k=41)
    fails("setting top_k of method 'eagle2' is 'all', not a whole number", stranger, top_k="all")
    fails("depth 0 must be at least 1", stranger, depth=0)


def refused(own: HeadDrafter, params, message: str):
    model, weights = target()
    with pytest.raises(SpecjaxError, match=message) as caught:
        check_request(Params(weights, params), prompt(1), model, own, 4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", DRAFTERS)
def test_heads_of_other_targets_and_params_of_other_heads_are_refused(name):
    own, right = DRAFTERS[name], head()[1]
    check_request(Params(target()[1], right), prompt(1), target()[0], own, 4)
    other = drafter(vocab_size=41)
    refused(other, head(41)[1], "target of vocab_size 41, this one has 40; use a head that was")
    shape = replace(own.head.config.layers, hidden_size=64)
    wide = EagleHead(replace(own.head.config, layers=shape))
    refused(replace(own, head=wide), right, "target of hidden_size 64, this one has 32; use a head")
    elsewhere = Llama(replace(target()[0].config, rms_norm_eps=1e-3))
    refused(replace(own, target=elsewhere), right, "the drafter was built with another target")
    for wrong in (None, {}, jnp.zeros(3), {**right, "fc": {}}, target()[1]):
        refused(own, wrong, "the params are not the weights of this head .*; pass those that were")
