"""ParallelSpec: what it drafts against the training pass over the same text; its passes and law."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.decoding.drafters._trees import MEDUSA_TREE

from specjax.core.errors import SpecjaxError
from specjax.decoding import round as round_module
from specjax.decoding.drafter import Context, Params
from specjax.decoding.drafters.eagle import PUBLISHED_TREE
from specjax.decoding.drafters.parallel_spec import (
    ParallelMedusaSettings,
    ParallelSettings,
    ParallelSpec,
)
from specjax.decoding.generate import start_loop
from specjax.decoding.request import check_request
from specjax.decoding.round import one_round
from specjax.decoding.sampling import Draw, Sampling
from specjax.models.heads.eagle import embed
from specjax.models.heads.parallel import ParallelHead
from tests.decoding.heads import LONGEST, features_of, predicted
from tests.decoding.parallel_heads import (
    PARALLEL_DYNAMIC,
    PARALLEL_EAGLE,
    PARALLEL_MEDUSA,
    TREE,
    features_for,
    parallel_head,
    parallel_params,
)
from tests.decoding.test_distribution import VOCAB, p_value
from tests.decoding.test_tree import assert_well_formed
from tests.decoding.test_with_head import BATCH, END, KEY, NEW_TOKENS, Round, some_path
from tests.decoding.tiny import prompt, target

DRAFTERS = {"eagle": PARALLEL_EAGLE, "medusa": PARALLEL_MEDUSA}
assert_close = partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5)


def params_of(own: ParallelSpec) -> Params:
    return parallel_params(own.reads_features)


@cache
def rounds(name: str) -> list[Round]:
    """All rounds of a generation in which paths of all lengths are accepted."""
    own, model = DRAFTERS[name], target()[0]
    given = params_of(own)
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
    finally:
        round_module.verify = right
    return found


@partial(jax.jit, static_argnums=2)
def trained(params: Params, tokens: Any, own: ParallelSpec) -> Any:
    """What the training pass says at every slot of whole texts, `[k + 1, B, S, D]`."""
    features = features_for(own.head, features_of(params, tokens, own.target))
    embedded = embed(params.target, jnp.roll(tokens, -1, axis=1))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    streams, predictions = (), []
    for _ in range(own.head.config.num_depths):
        prediction, stream = own.head.step(
            params.drafter, embedded, features, streams, positions, jnp.ones_like(positions)
        )
        predictions.append(prediction)
        streams = (*streams, stream)
    return jnp.stack(predictions)


def committed(state: Any) -> Any:
    """The tokens of each row, then zeros."""
    tokens = np.zeros((BATCH, LONGEST), np.int32)
    for row, length in enumerate(state.length):
        tokens[row, :length] = state.tokens[row, :length]
    return jnp.asarray(tokens)


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_draft_is_what_the_training_pass_says_there(name):
    own, pending = DRAFTERS[name], set()
    given = params_of(own)
    catch_up = jax.jit(partial(own.catch_up, num_masks=own.max_depth - 1))
    propose = jax.jit(own.propose)
    for found in rounds(name)[:8:2]:
        state = jax.tree.map(jnp.asarray, found.before)
        context = Context(state.tokens, state.length)
        features, _ = catch_up(given, state.drafter, context)
        draw = Draw(state.row_keys, state.length, Sampling())
        tree = jax.device_get(propose(given, state.drafter, context, draw)[0].tree)
        assert_well_formed(tree)
        assert tree.valid.all()
        said = trained(given, committed(found.before), own)
        for row in np.flatnonzero(found.before.drafter.num_pending):
            pending.add(int(found.before.drafter.num_pending[row]))
            expected = said[: own.max_depth, row, found.before.length[row] - 2]
            assert_close(features[row], expected, atol=1e-5 * np.abs(expected).max())
            logits = own.target.logits(given.target, expected)
            ranked = np.argsort(-np.asarray(logits), axis=-1)
            tokens = [ranked[len(choice) - 1, choice[-1]] for choice in sorted(TREE, key=order)]
            np.testing.assert_array_equal(tree.tokens[row, 1:], tokens)
    assert len(pending) > 2


def order(choice: tuple[int, ...]):
    return len(choice), choice


@pytest.mark.parametrize("name", DRAFTERS)
def test_masks_leave_nothing_behind_in_the_cache(name):
    """After paths of all lengths it holds the committed text, as from one pass without masks."""
    own = DRAFTERS[name]
    given, whole = params_of(own), rounds(name)
    counts = np.array([found.after.length - found.before.length for found in whole])
    assert set(counts.flat) == set(range(own.max_depth + 2))
    for state in [whole[0].before, *(found.after for found in whole[::3])]:
        tokens = committed(state)
        features = features_of(given, tokens, own.target)
        of_head = features_for(own.head, features)
        _, fresh = predicted(given, tokens, of_head, own.head)
        mine = state.drafter
        np.testing.assert_array_equal(mine.cache.length + mine.num_pending, state.length - 1)
        assert mine.pending.shape == (BATCH, own.max_depth + 1, of_head.shape[2])
        for row, held in enumerate(mine.cache.length):
            np.testing.assert_array_equal(mine.cache.positions[row, :held], np.arange(held))
            count = mine.num_pending[row]
            assert_close(mine.pending[row, :count], of_head[row, held : held + count])
            for kept, its in zip(
                mine.cache.keys + mine.cache.values, fresh.keys + fresh.values, strict=True
            ):
                assert_close(kept[row, :, :held], its[row, :, :held])


# ---- passes and law ------------------------------------------------------------------------------


CALLS: list[int] = []


class Counted(ParallelHead):
    """Tells how many rows each of its passes has; nothing in `propose` runs conditionally."""

    @nn.nowrap
    def run(self, params, target_params, rows, features, cache):
        CALLS.append(rows.tokens.shape[1])
        return super().run(params, target_params, rows, features, cache)


@pytest.mark.parametrize(
    "own, rows",
    [
        (PARALLEL_EAGLE, 4 + 2),
        (PARALLEL_MEDUSA, 4 + 2),
        (PARALLEL_DYNAMIC, 5 + 3),
        (replace(PARALLEL_EAGLE, settings=ParallelSettings()), 5 + 3),  # a tree deeper than that
        (replace(PARALLEL_EAGLE, settings=ParallelSettings(((0,), (1,)))), 2),
    ],
)
def test_a_round_takes_one_pass_with_as_many_masks_as_the_tree_needs(own, rows):
    own, given = replace(own, head=Counted(own.head.config)), params_of(own)
    settings = {"target": own.target, "drafter": own, "max_new_tokens": 8}
    state = start_loop(given, prompt(BATCH), KEY, **settings)
    draw = Draw(state.row_keys, state.length, Sampling())
    CALLS.clear()
    jaxpr = jax.make_jaxpr(own.propose)(
        given, state.drafter, Context(state.tokens, state.length), draw
    )
    assert not {"cond", "while", "scan"} & {str(equation.primitive) for equation in jaxpr.eqns}
    assert [rows] == CALLS


@pytest.mark.parametrize(
    "settings",
    [
        ParallelSettings(((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0))),
        ParallelSettings(tree="dynamic", top_k=2, num_tokens=6),
    ],
    ids=["drawn", "chosen"],
)
def test_trees_keep_the_law(settings):
    """Algorithm 1; that `p_value` sees when something is wrong, test_distribution.py shows."""
    module, params = parallel_head(vocab_size=VOCAB, layers=1)
    own = ParallelSpec(module, target(VOCAB, layers=1)[0], settings)
    assert p_value(own, params) > 1e-3


# ---- settings ------------------------------------------------------------------------------------


def test_each_kind_has_the_tree_of_the_method_that_it_replaces():
    assert ParallelSettings().choices == PUBLISHED_TREE
    assert ParallelMedusaSettings().choices == MEDUSA_TREE
    model, head = target()[0], parallel_head(reads_features=False)[0]
    own = ParallelMedusaSettings().build(head, model)
    assert isinstance(own, ParallelSpec)
    assert (own.num_nodes, own.max_depth, own.num_fed) == (64, 4, 3)
    assert own == ParallelSpec(head, model, ParallelMedusaSettings())
    assert hash(own) == hash(ParallelMedusaSettings().build(head, model))
    assert own.taps.hidden_layers == () and PARALLEL_EAGLE.taps.hidden_layers == (2,)
    dynamic = PARALLEL_DYNAMIC
    assert (dynamic.num_nodes, dynamic.max_depth, dynamic.num_fed) == (12, 4, 3)


def test_what_does_not_belong_together_is_refused():
    model, params = target()
    with pytest.raises(SpecjaxError, match="41 children of one node, but the target has only 40"):
        ParallelSettings(tree="dynamic", top_k=41).build(PARALLEL_EAGLE.head, model)
    other = Params(params, parallel_head(reads_features=False)[1])
    with pytest.raises(SpecjaxError, match="the params are not the weights of this head"):
        check_request(other, prompt(1), model, PARALLEL_EAGLE, 4)
    check_request(other, prompt(1), model, PARALLEL_MEDUSA, 4)
