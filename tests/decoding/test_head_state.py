"""Drafters with a head: the state they carry, the passes they take, and the params they refuse."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.decoding import Drafter, Engine, Params
from specjax.decoding.drafters._heads import HeadState
from specjax.decoding.drafters._trees import MEDUSA_TREE
from specjax.decoding.drafters.eagle import Eagle
from specjax.decoding.drafters.eagle2 import Eagle2
from specjax.decoding.drafters.hydra import Hydra
from specjax.decoding.drafters.medusa import Medusa
from specjax.decoding.drafters.parallel_spec import ParallelSpec, ParallelSpecMedusa
from specjax.decoding.prompt import from_ids
from specjax.decoding.state import LoopState
from specjax.models.transformer import Transformer
from tests.decoding import heads
from tests.decoding.contract import KEY, assert_params_rejected
from tests.decoding.rounds import rounds_of, some_path, texts_of
from tests.decoding.tiny import BATCH, prompt, target

WITH_CACHE = {
    name: headed for name, headed in (heads.STATIC | heads.DYNAMIC).items() if "medusa" not in name
}
WITH_CACHE.pop("parallel dynamic")  # keeps what "parallel" keeps
assert_close = partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_CACHE)
def test_the_cache_and_the_pending_features_are_those_of_the_committed_text(name):
    """As from one pass over it: masks and drafted nodes leave nothing behind."""
    headed, played, pending = WITH_CACHE[name], heads.played_by(name), set()
    for state in [played[0].before, *(each.after for each in played)]:
        assert_of_text(headed, state, state.drafter, headed.drafter.max_depth)
        pending.update(state.drafter.num_pending.tolist())
    assert len(pending) > 2
    for each in played:
        before, after = each.before.drafter, each.after.drafter
        for row in np.flatnonzero(each.before.is_done):  # it no longer changes
            assert after.num_pending[row] == 0
            held = each.before.length[row] - 1
            if before.cache.length[row] == held:
                for mine, its in zip(before.cache.keys, after.cache.keys, strict=True):
                    np.testing.assert_array_equal(mine[row, :, :held], its[row, :, :held])


def assert_of_text(headed: heads.Headed, state: LoopState, kept: HeadState, max_depth: int) -> None:
    """Asserts that a head's state is that of one pass over the committed texts."""
    tokens, head = heads.padded(texts_of(state)), headed.drafter.head
    features = heads.features_of(headed.request, tokens, target()[0])
    features = heads.features_for(head, features)
    _, fresh = heads.predicted(headed.request, tokens, features, head)
    features, fresh = jax.device_get((features, fresh))  # slices of arrays would be compiled
    np.testing.assert_array_equal(kept.cache.length + kept.num_pending, state.length - 1)
    assert kept.pending.shape == (BATCH, max_depth + 1, features.shape[2])
    for row, held in enumerate(kept.cache.length):
        count = kept.num_pending[row]
        assert_close(kept.pending[row, :count], features[row, held : held + count])
        if fresh.keys:
            np.testing.assert_array_equal(kept.cache.positions[row, :held], np.arange(held))
        pairs = zip(kept.cache.keys + kept.cache.values, fresh.keys + fresh.values, strict=True)
        for mine, its in pairs:
            assert_close(mine[row, :, :held], its[row, :, :held])


def before_roots(state) -> np.ndarray:
    """The target's feature of the token before each root, from one pass over the texts."""
    texts = heads.padded(texts_of(state))
    features = np.asarray(heads.features_of(heads.MEDUSA.request, texts, target()[0]))
    return features[np.arange(BATCH), np.asarray(state.length) - 2]


def test_medusas_feature_is_that_of_the_token_before_the_root():
    for each in heads.played_by("medusa"):
        assert_close(each.before.drafter, before_roots(each.before))
        assert_close(each.after.drafter, before_roots(each.after))


class Uncut(Medusa):
    """Takes the last accepted node's feature, whether or not it is part of the text."""

    def update(self, target, params, state, outcome):
        on_path = outcome.along_path(outcome.output.hidden[:, :, 0])
        last = outcome.verification.num_accepted[:, None, None]
        return jnp.take_along_axis(on_path, last, axis=1)[:, 0]


def test_a_feature_beyond_the_end_of_a_text_is_caught():
    uncut = Uncut(heads.MEDUSA.drafter.head, choices=heads.CHOICES)
    engine = Engine(target()[0], uncut, max_new_tokens=60, eos=heads.END)
    for each in rounds_of(engine, heads.MEDUSA.request, verify=some_path):
        state = each.after
        wrong = np.abs(state.drafter - before_roots(state)).max(axis=1) > 1e-3
        assert not (wrong & ~state.is_done).any()
    assert wrong.any()


def test_a_long_prompt_is_prefilled_in_chunks():
    numbers = np.random.default_rng(3)
    texts = [numbers.integers(0, 40, count).tolist() for count in (300, 2, 130)]
    engine = Engine(target()[0], heads.EAGLE2.drafter, max_new_tokens=8)
    state = engine.prefill(heads.EAGLE2.request, from_ids(texts, bucket=50), KEY)
    state = jax.device_get(state)
    np.testing.assert_array_equal(state.drafter.num_pending, [1, 1, 1])
    assert_of_text(heads.EAGLE2, state, state.drafter, engine.drafter.max_depth)


CALLS: list[int] = []  # the rows of each pass of a head


def program(drafter: Drafter, request: Params):
    """The jaxpr of one proposal."""
    engine = Engine(target()[0], drafter, max_new_tokens=8)
    state = jax.eval_shape(engine.prefill, request, prompt(), KEY)
    CALLS.clear()
    return jax.make_jaxpr(engine.propose)(request, state)


@pytest.mark.parametrize(
    "headed, rows",
    [
        (heads.EAGLE, [5, 3, 2, 1]),
        (heads.EAGLE2, [4, 3, 3]),
        (heads.Headed(Eagle2, heads.eagle_head, top_k=3, depth=6, num_tokens=3), [3, 3]),
        # All masks that the tree needs stand in the one pass.
        (heads.STATIC["parallel"], [4 + 2]),
        (heads.DYNAMIC["parallel dynamic"], [4 + 2]),
        (heads.Headed(ParallelSpec, heads.parallel_head), [5 + 3]),  # a tree deeper than that
    ],
)
def test_a_round_takes_one_pass_to_catch_up_and_one_for_each_further_depth(
    headed, rows, monkeypatch
):
    kind = type(headed.drafter.head)
    run = kind.run

    def counted(head, weights, rows, *given):
        CALLS.append(rows.tokens.shape[1])
        return run(head, weights, rows, *given)

    monkeypatch.setattr(kind, "run", counted)
    jaxpr = program(headed.drafter, headed.request)
    assert not {"cond", "while", "scan"} & {str(equation.primitive) for equation in jaxpr.eqns}
    assert rows == CALLS


@pytest.mark.parametrize(
    "choices, num_products",
    [
        (heads.CHOICES, 3 * 3),  # a block, applied twice, and an LM head each
        (MEDUSA_TREE, 4 * 3),  # the published tree is as deep as four heads
    ],
)
def test_medusa_heads_deeper_than_the_tree_are_not_computed(choices, num_products):
    jaxpr = program(replace(heads.MEDUSA.drafter, choices=choices), heads.MEDUSA.request)
    assert str(jaxpr).count("dot_general[") == num_products


def test_defaults_are_those_published():
    eagle, hydra, parallel = (
        make()[0] for make in (heads.eagle_head, heads.hydra_head, heads.parallel_head)
    )
    assert Eagle2(eagle) == Eagle2(eagle, top_k=10, depth=6, num_tokens=60, noise_share=0.8)
    sizes = {  # nodes, depth, and nodes that pass the head's layers
        Eagle(eagle): (26, 5, 10),
        Eagle2(eagle): (60, 6, 50),
        Hydra(hydra): (64, 4, 0),
        Hydra(hydra.clone(config=replace(hydra.config, num_heads=2)), heads.CHOICES): (8, 2, 0),
        ParallelSpec(parallel): (24, 4, 3),  # as deep as its masks
        ParallelSpecMedusa(parallel): (64, 4, 3),
    }
    for drafter, expected in sizes.items():
        assert (drafter.num_nodes, drafter.max_depth, drafter.num_fed) == expected


def test_choices_that_do_not_form_a_tree_are_rejected():
    for choices, message in (
        ((), "there are no tree choices"),
        (((0,), ()), r"tree choice \(\) is not a path of ranks"),
        (((0,), (0, -1)), r"tree choice \(0, -1\) is not a path of ranks"),
        (((0,), (0, 0, 0)), r"tree choice \(0, 0, 0\) has no parent; add \(0, 0\) to the choices"),
        (((0,), (2,)), r"tree choice \(2,\) leaves out its better sibling; add \(1,\)"),
    ):
        with pytest.raises(SpecjaxError, match=message) as caught:
            replace(heads.EAGLE.drafter, choices=choices)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["eagle2", "hydra", "hydra with prefix", "medusa", "parallel"])
def test_heads_params_and_trees_that_do_not_fit_are_rejected(name):
    headed = (heads.STATIC | heads.DYNAMIC)[name]
    drafter, params = headed.pair
    Engine(target()[0], drafter, max_new_tokens=4).check(headed.request, prompt(1))
    others = heads.STATIC["hydra" if "hydra with" in name else "hydra with prefix"].params
    broken = {**params, next(iter(params)): {}}
    for wrong in (None, {}, jnp.zeros(3), broken, others, target()[1]):
        message = "the params are not the weights of this head .*; pass those"
        assert_params_rejected(drafter, wrong, message)
    other = Transformer(replace(target()[0].config, vocab_size=41))
    message = "target of vocab_size 40, this one has 41; use a head that was"
    with pytest.raises(SpecjaxError, match=message):
        drafter.check(other, params)
    wide = {"eagle2": {"top_k": 41}, "parallel": {"tree": "dynamic", "top_k": 41}}
    wide = wide.get(name, {"choices": tuple((rank,) for rank in range(41))})
    message = "41 children, but the head drafts only 40"
    assert_params_rejected(replace(drafter, **wide), params, message)
