"""What drafters with a head share, round by round: what the head has seen, passes, loading."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.decoding import round as round_module
from specjax.decoding.drafter import Context, Params
from specjax.decoding.drafters._heads import HeadDrafter
from specjax.decoding.drafters.eagle import Eagle, EagleSettings
from specjax.decoding.drafters.eagle2 import Eagle2, Eagle2Settings
from specjax.decoding.generate import start_loop
from specjax.decoding.prompt import from_ids
from specjax.decoding.request import check_request
from specjax.decoding.round import one_round
from specjax.decoding.sampling import Draw, Sampling
from specjax.decoding.state import LoopState
from specjax.decoding.tree import DraftTree, Verification, ancestors
from specjax.loading import load_drafter
from specjax.hub import LoadedTarget
from specjax.models.heads.eagle import EagleHead
from specjax.models.io.formats.eagle import EAGLE as FORMAT
from specjax.models.io.head_files import save_head
from specjax.models.transformer import Transformer
from specjax.models.fingerprint import fingerprint
from tests.decoding.heads import (
    EAGLE,
    EAGLE2,
    LONGEST,
    TREE,
    Literal,
    features_of,
    head,
    params_of,
    predicted,
)
from tests.decoding.tiny import prompt, target

BATCH, NEW_TOKENS = 3, 60
KEY = jax.random.key(2)
DRAFTERS = {"eagle": EAGLE, "eagle2": EAGLE2}
END = 35
assert_close = partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5)


def some_path(tree, logits, draw, root_slot, max_depth) -> Verification:
    """Accepts a random number of tokens, those of the last valid node of that depth."""
    del logits, draw
    keys = jax.vmap(jax.random.fold_in, (None, 0))(KEY, root_slot)
    wanted = jax.vmap(lambda key: jax.random.randint(key, (), 0, max_depth + 1))(keys)
    fits = tree.valid & (tree.depth <= wanted[:, None])
    deepest = jnp.max(jnp.where(fits, tree.depth, 0), axis=1)
    is_deepest = fits & (tree.depth == deepest[:, None])
    last = tree.num_nodes - 1 - jnp.argmax(is_deepest[:, ::-1], axis=1)
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
            assert_close(pending, features[row, held : held + count])
            np.testing.assert_array_equal(own.cache.positions[row, :held], np.arange(held))
            for mine, its in zip(
                own.cache.keys + own.cache.values, fresh.keys + fresh.values, strict=True
            ):
                assert_close(mine[row, :, :held], its[row, :, :held])


def later_trees(name: str) -> Iterator[tuple[int, Literal, DraftTree]]:
    """Of rounds that have two tokens and more to catch up with: row, its text, all rows' trees."""
    own, pending = DRAFTERS[name], set()
    propose = jax.jit(own.propose)
    for found in rounds(name)[2:8:2]:
        state = jax.tree.map(jnp.asarray, found.before)
        draw = Draw(state.row_keys, state.length, Sampling())
        context = Context(state.tokens, state.length)
        tree = jax.device_get(propose(params_of(), state.drafter, context, draw)[0].tree)
        for row in np.flatnonzero(found.before.drafter.num_pending > 1):
            pending.add(int(found.before.drafter.num_pending[row]))
            text = found.before.tokens[row, : found.before.length[row]].tolist()
            yield int(row), Literal(params_of(), head()[0], target()[0], text), tree
    assert len(pending) > 1


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
        assert_close(state.pending[row, 0], features[row, held])
        for mine, its in ((state.cache.keys, fresh.keys), (state.cache.values, fresh.values)):
            assert_close(mine[0][row, :, :held], its[0][row, :, :held])


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
    draw = Draw(state.row_keys, state.length, Sampling())
    context = Context(state.tokens, state.length)
    CALLS.clear()
    jaxpr = jax.make_jaxpr(own.propose)(given, state.drafter, context, draw)
    assert not {"cond", "while", "scan"} & {str(equation.primitive) for equation in jaxpr.eqns}
    return list(CALLS)


@pytest.mark.parametrize(
    "own, rows",
    [
        (EAGLE, [5, 3, 2, 1]),
        (replace(EAGLE, settings=EagleSettings()), [6, 4, 4, 1, 1]),
        (replace(EAGLE, settings=EagleSettings(((0,), (1,)))), [2]),
        (EAGLE2, [4, 3, 3]),
        (replace(EAGLE2, settings=Eagle2Settings()), [7, 10, 10, 10, 10, 10]),
        (replace(EAGLE2, settings=Eagle2Settings(3, 6, num_tokens=3)), [3, 3]),
    ],
)
def test_a_round_takes_one_pass_to_catch_up_and_one_for_each_further_depth(own, rows):
    assert passes(own, BATCH) == rows


# ---- loading, and params ------------------------------------------------------------------------


@cache
def tiny() -> LoadedTarget:
    model, params = target()
    return LoadedTarget(model, params, None, model.config, "tiny")


def save(folder: Path, about: dict | None = None) -> Path:
    config = target()[0].config
    save_head(folder, FORMAT, *head(), jnp.float32, target=config, about=about)
    return folder


@pytest.mark.parametrize("method", ["eagle", "eagle2", "hass"])
def test_a_head_in_a_folder_becomes_a_drafter(method, tmp_path):
    owner = fingerprint(tiny().config, tiny().params)
    given: dict[str, Any] = {"num_tokens": 12, "noise_share": 0.0}
    given = {"choices": TREE} if method == "eagle" else given
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
    fails("no-such-head.* is not a head", tmp_path / "no-such-head")
    fails("holds no config.json; give the folder of an EAGLE, EAGLE-2 or HASS head", tmp_path)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    fails("is a run that has not finished and has no head yet", tmp_path / "run")
    save(tmp_path / "run" / "head")
    load_drafter("eagle2", tiny(), tmp_path / "run")
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
    other = replace(own, head=head(41)[0])
    refused(other, head(41)[1], "target of vocab_size 41, this one has 40; use a head that was")
    shape = replace(own.head.config.layers, hidden_size=64)
    wide = EagleHead(replace(own.head.config, layers=shape))
    refused(replace(own, head=wide), right, "target of hidden_size 64, this one has 32; use a head")
    elsewhere = Transformer(replace(target()[0].config, rms_norm_eps=1e-3))
    refused(replace(own, target=elsewhere), right, "the drafter was built with another target")
    for wrong in (None, {}, jnp.zeros(3), {**right, "fc": {}}, target()[1]):
        refused(own, wrong, "the params are not the weights of this head .*; pass those that were")
