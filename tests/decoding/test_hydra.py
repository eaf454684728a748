"""Hydra: its trees against literal ones, the prefix layer's cache, its law, and what is refused."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.decoding import round as round_module
from specjax.decoding.drafter import Context
from specjax.decoding.drafters.hydra import Hydra, HydraSettings
from specjax.decoding.generate import start_loop
from specjax.decoding.request import check_request
from specjax.decoding.round import one_round
from specjax.decoding.sampling import Draw, Sampling
from specjax.decoding.state import LoopState
from tests.decoding.heads import LONGEST, features_of
from tests.decoding.hydra_heads import (
    CHOICES,
    HYDRA,
    HYDRA_PREFIX,
    HydraLiteral,
    from_scratch,
    hydra_head,
    hydra_params,
)
from tests.decoding.test_distribution import VOCAB, p_value
from tests.decoding.test_eagle import expanded, found_paths
from tests.decoding.test_tree import assert_well_formed
from tests.decoding.test_with_head import some_path
from tests.decoding.tiny import prompt, target

BATCH, NEW_TOKENS, END = 3, 60, 32
KEY = jax.random.key(2)
DRAFTERS = {"hydra": HYDRA, "hydra with prefix": HYDRA_PREFIX}
assert_close = partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5)
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.8, top_k=9, top_p=0.9),
    "rejection": Sampling(temperature=0.8, top_k=2, verification="rejection"),
}


def params_of(own: Hydra):
    return hydra_params(own.head.config.has_prefix)


@cache
def rounds(name: str) -> list[LoopState]:
    """Before the first round and after each, paths of all lengths being accepted."""
    own = DRAFTERS[name]
    settings = {"target": own.target, "drafter": own, "max_new_tokens": NEW_TOKENS}
    right, round_module.verify = round_module.verify, some_path
    try:
        step = jax.jit(
            lambda state: one_round(
                params_of(own), state, own.target, own, Sampling(), NEW_TOKENS, (END,)
            )
        )
        states = [start_loop(params_of(own), prompt(BATCH), KEY, **settings)]
        while not states[-1].is_done.all():
            states.append(step(states[-1]))
    finally:
        round_module.verify = right
    return jax.device_get(states)


# ---- what is kept ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_prefix_cache_and_the_pending_features_are_those_of_the_committed_text(name):
    """After every round, wherever the path was cut: by EOS, by the room, or by the target."""
    own = DRAFTERS[name]
    for state in rounds(name):
        tokens = np.zeros((BATCH, LONGEST), np.int32)
        for row, length in enumerate(state.length):
            tokens[row, :length] = state.tokens[row, :length]
        features = features_of(params_of(own), jnp.asarray(tokens), own.target)
        _, fresh = from_scratch(params_of(own), jnp.asarray(tokens), own)
        kept = state.drafter
        np.testing.assert_array_equal(kept.cache.length + kept.num_pending, state.length - 1)
        for row, held in enumerate(kept.cache.length):
            count = kept.num_pending[row]
            pending = features[row, held : held + count]
            assert_close(kept.pending[row, :count], pending)
            for mine, its in zip(
                kept.cache.keys + kept.cache.values, fresh.keys + fresh.values, strict=True
            ):
                assert_close(mine[row, :, :held], its[row, :, :held])
        assert len(fresh.keys) == own.head.config.layers.num_hidden_layers
    lengths = np.diff([state.length for state in rounds(name)], axis=0)
    assert set(lengths.ravel()) >= {0, 1, 2, 3, 4}
    last = rounds(name)[-1]
    ends = [int(last.tokens[row, last.length[row] - 1]) for row in range(BATCH)]
    assert END in ends and set(ends) != {END}


# ---- the tree ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_node_is_the_token_of_its_rank_below_its_parent(name, sampling):
    """In the middle of texts, with one feature and more to catch up with."""
    own, settings = DRAFTERS[name], SAMPLINGS[sampling]
    pending, second = set(), set()
    propose, keys = jax.jit(own.propose), jax.random.split(KEY, BATCH)
    for state in rounds(name)[:7:3]:
        pending |= set(state.drafter.num_pending.tolist())
        draw = Draw(keys, jnp.asarray(state.length), settings)
        context = Context(jnp.asarray(state.tokens), draw.round_start)
        kept = jax.tree.map(jnp.asarray, state.drafter)
        tree = jax.device_get(propose(params_of(own), kept, context, draw)[0].tree)
        assert_well_formed(tree)
        for row in map(int, np.flatnonzero(~state.is_done)):
            text = state.tokens[row, : state.length[row]].tolist()
            literal = HydraLiteral(params_of(own), own, text)
            expected, laws = expanded(CHOICES, settings, literal, keys[row])
            assert found_paths(tree, row) == expected
            second.add(len({path[1] for path in expected if len(path) == 2}))
            if sampling != "rejection":
                assert tree.valid[row].all() and tree.proposal is None
                continue
            assert tree.proposal is not None
            for path, law in laws.items():  # what each node says that its children were drawn from
                node = 1 + expected.index(path) if path else 0
                np.testing.assert_allclose(tree.proposal[row, node], law, atol=1e-4)
    assert len(pending) > 1
    # Of tokens at depth 2, which are (0, 0), (0, 1), (1, 0) and (2, 0): two if they did not depend
    # on the token above, as Medusa's.
    assert max(second) > 2


def test_choices_deeper_than_the_heads_are_left_out():
    own = Hydra(hydra_head(num_heads=2)[0], target()[0], HydraSettings(CHOICES))
    assert own.choices == tuple(choice for choice in CHOICES if len(choice) < 3)
    assert (own.num_nodes, own.max_depth, own.num_fed) == (8, 2, 0)
    assert (HYDRA.num_nodes, HYDRA.max_depth, HYDRA.num_fed) == (11, 3, 0)
    whole = HydraSettings().build(HYDRA.head, HYDRA.target)
    assert (whole.num_nodes, whole.max_depth) == (64, 4)
    assert hash(own) == hash(Hydra(own.head, own.target, HydraSettings(CHOICES)))


# ---- rejection ---------------------------------------------------------------------------------


FEW = HydraSettings(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0)))
OF_LAW = {"vocab_size": VOCAB, "layers": 1, "has_lm_heads": False}


def test_drawn_trees_keep_the_law():
    own = FEW.build(hydra_head(True, **OF_LAW)[0], target(VOCAB, 1)[0])
    assert p_value(own, hydra_head(True, **OF_LAW)[1]) > 1e-3


# ---- what is refused ---------------------------------------------------------------------------


def test_more_children_than_tokens_are_refused():
    with pytest.raises(SpecjaxError, match="41 children of one node, but the target has only 40"):
        HydraSettings(tuple((rank,) for rank in range(41))).build(HYDRA.head, HYDRA.target)
    with pytest.raises(SpecjaxError, match=r"leaves out its better sibling; add \(1,\)"):
        HydraSettings(((0,), (2,)))


def test_heads_of_other_targets_and_params_of_other_heads_are_refused():
    weights = target()[1]
    right = params_of(HYDRA)
    check_request(right, prompt(1), target()[0], HYDRA, 4)
    for own, params, message in (
        (replace(HYDRA, head=hydra_head(vocab_size=41)[0]), right, "target of vocab_size 41"),
        (HYDRA, params_of(HYDRA_PREFIX), "the params are not the weights of this head"),
        (HYDRA, right._replace(drafter=weights), "the params are not the weights of this head"),
    ):
        with pytest.raises(SpecjaxError, match=message):
            check_request(params, prompt(1), target()[0], own, 4)
