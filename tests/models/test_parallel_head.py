"""The ParallelSpec head in training sees what it sees while it drafts, shown by drafting.

`drafts` is the slow truth: below every slot on its own `head.run` reads a group of masks with a
cache, as decoding does. `groups` is what training does: whole texts at once, depth by depth.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params

from specjax.core.errors import SpecjaxError
from specjax.models.cache import KVCache
from specjax.models.heads import HeadWeights
from specjax.models.heads import training_attention as attention
from specjax.models.heads.eagle import EagleConfig, EagleHead
from specjax.models.heads.parallel import ParallelConfig, ParallelHead, from_eagle
from specjax.models.target import causal_rows
from tests.models.test_eagle_head import LAYER, LENGTH, TARGET, VOCAB, Texts, texts, weights

MASKS = 3
TWO = replace(LAYER, num_hidden_layers=2)
HEAD: Any = ParallelHead(ParallelConfig(TWO, MASKS, fc_bias=True))


# ---- Training: all groups, one depth at a time ---------------------------------------------------


def groups(head, params, target_params, text: Texts, turn: int = 0):
    """Returns the predictions of each depth, `[k + 1, B, T, D]`; `turn` is for mutants."""
    embedded, streams, predictions = TARGET.embed(target_params, text.tokens), (), []
    for depth in range(head.config.num_depths):
        positions = text.positions + turn * depth
        predicted, own = head.step(
            params, embedded, text.features, streams, positions, text.segments
        )
        predictions.append(predicted)
        streams = (*streams, own)
    return jnp.stack(predictions)


# ---- Decoding: each group alone, with a cache ----------------------------------------------------


def drafts(head, params, target_params, text: Texts):
    """Returns the expected result of `groups`: the real slots, then the masks below each."""
    batch, length = text.tokens.shape
    num_masks = head.config.num_masks
    empty = KVCache.create(head.config.layers, batch, length + num_masks, prompt_length=length)
    rows = causal_rows(text.tokens, jnp.zeros(batch, jnp.int32))
    real, written = head.run(HeadWeights(params, TARGET, target_params), rows, text.features, empty)

    def below(slot):
        own = written.advance(jnp.full((batch,), slot + 1))
        masks = jnp.broadcast_to(VOCAB + jnp.arange(num_masks), (batch, num_masks))
        rows = causal_rows(masks, own.length)
        nothing = jnp.full((batch, num_masks, text.features.shape[2]), jnp.nan)
        return head.run(HeadWeights(params, TARGET, target_params), rows, nothing, own)[0]

    of_masks = lax.map(below, jnp.arange(length))  # [T, B, k, D]
    return jnp.concatenate([real[None], jnp.moveaxis(of_masks, 2, 0).swapaxes(1, 2)])


@cache
def truth() -> np.ndarray:
    return np.asarray(jax.jit(partial(drafts, HEAD))(*weights(HEAD), texts()))


@jax.jit
def of_groups(turn, params, target_params, text: Texts) -> jax.Array:
    return groups(HEAD, params, target_params, text, turn)


def test_every_depth_predicts_what_a_group_alone_does():
    for depth in range(MASKS):  # each depth says something else
        assert np.abs(truth()[depth] - truth()[depth + 1]).max(axis=(0, 2)).min() > 0.1
    np.testing.assert_allclose(of_groups(0, *weights(HEAD), texts()), truth(), atol=1e-5)


# ---- Mutants: the comparison above fails for wrong contexts --------------------------------------


def shifted(rows, by: int):
    return tuple(jnp.roll(part, by, axis=2) for part in rows)


ITSELF, NEXT = np.eye(LENGTH, dtype=bool)[None], np.eye(LENGTH, k=1, dtype=bool)[None]
WRONG = {
    "masks see no other masks": lambda far, near: (
        far,
        [(rows, is_near & False) for rows, is_near in near[:-1]] + near[-1:],
    ),
    "masks see those of the group before": lambda far, near: (
        far,
        [(shifted(rows, 1), is_near) for rows, is_near in near[:-1]] + near[-1:],
    ),
    "masks do not see their own slot": lambda far, near: (far & ~ITSELF if near else far, near),
    "masks see the real slot that follows": lambda far, near: (far | NEXT if near else far, near),
}


@jax.jit
def by_rule(number: int, params, target_params, text: Texts) -> jax.Array:
    """The predictions of `groups` where slots see what one of the wrong rules names."""
    right = attention.training_attention

    def wrong(query, far, is_far, near):
        seen = [rule(is_far, near) for rule in WRONG.values()]
        return right(query, far, *jax.tree.map(lambda *each: jnp.stack(each)[number], *seen))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "training_attention", wrong)
        return groups(HEAD, params, target_params, text)


@pytest.mark.parametrize("rule", WRONG)
def test_a_wrong_context_is_caught(rule):
    found = by_rule(list(WRONG).index(rule), *weights(HEAD), texts())
    np.testing.assert_allclose(found[0], truth()[0], atol=1e-5)  # no masks: no choice
    assert np.abs(found - truth()).max() > 1e-2


def test_masks_at_the_place_of_their_slot_are_caught():
    found = of_groups(-1, *weights(HEAD), texts())
    assert np.abs(found - truth())[1:].max(axis=(1, 2, 3)).min() > 1e-2


# ---- Cost ----------------------------------------------------------------------------------------


def arrays_of(jaxpr) -> Iterator[int]:
    """The size of every array that a program makes, and those inside it."""
    for equation in jaxpr.eqns:
        yield from (math.prod(out.aval.shape) for out in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from arrays_of(inner)


def test_a_pass_costs_as_much_as_its_depths_and_has_no_larger_array():
    """T is long, so that rows that all see each other would cost the square of the group."""
    length = 256
    one = jnp.arange(length)[None]
    text = Texts(one % VOCAB, jnp.zeros((1, length, 0)), one, one * 0)

    def costs(num_masks: int):
        head: Any = ParallelHead(ParallelConfig(LAYER, num_masks, reads_features=False))
        params = jax.eval_shape(head.initialise, jax.random.key(0))
        table = {"embed_tokens": {"weight": jnp.zeros((VOCAB, 32))}}

        def loss(params):
            return jnp.mean(groups(head, params, table, text) ** 2)

        traced = jax.jit(jax.grad(loss)).trace(params)
        cost = traced.lower().cost_analysis()
        assert cost is not None
        return cost["flops"], max(arrays_of(traced.jaxpr.jaxpr))

    (two_cost, two_largest), (four_cost, four_largest) = costs(1), costs(3)
    assert 1.8 < four_cost / two_cost < 2.2  # 4 for the square
    heads = LAYER.num_attention_heads
    assert two_largest == heads * length * (length + 1)
    assert four_largest == heads * length * (length + 3)  # 4 times as many for the square


# ---- What a head is and begins with --------------------------------------------------------------


def test_a_head_from_eagle_drafts_its_first_token_as_eagle_does():
    eagle: Any = EagleHead(EagleConfig(TWO, fc_bias=True))
    trained, target_params = weights(eagle)
    head, params = from_eagle(eagle, trained, MASKS, jax.random.key(4))
    assert head == HEAD
    assert jax.tree.structure(params) == jax.tree.structure(weights(HEAD)[0])
    text = texts()
    embedded = TARGET.embed(target_params, text.tokens)
    inputs = (embedded, text.features, (), text.positions, text.segments)
    first, expected = (
        jax.jit(each.step)(own, *inputs)[0] for each, own in ((head, params), (eagle, trained))
    )
    np.testing.assert_array_equal(first, expected)
    masks = params["mask_embeddings"]["weight"]
    assert masks.shape == (MASKS, 32) and 0 < np.abs(masks).max() < 0.1
    assert len(np.unique(masks, axis=0)) == MASKS


def test_heads_of_both_kinds_have_the_published_shape():
    of_tokens = ParallelHead(ParallelConfig(LAYER, reads_features=False))
    params = jax.eval_shape(of_tokens.initialise, jax.random.key(0))
    assert sorted(params) == ["layers_0", "mask_embeddings", "norm"]
    assert "input_layernorm" in params["layers_0"]
    of_both = ParallelHead(ParallelConfig(LAYER))
    params = jax.eval_shape(lambda: of_both.initialise(jax.random.key(0), jnp.bfloat16))
    assert sorted(params) == ["fc", "layers_0", "mask_embeddings", "mask_hidden"]
    assert "input_layernorm" not in params["layers_0"]
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"num_masks": 0}, "num_masks 0 must be at least 1; the paper uses 4"),
        ({"reads_features": False, "fc_bias": True}, "reads no features has no fc; leave fc_bias"),
    ],
)
def test_impossible_shapes_are_refused(settings, message):
    with pytest.raises(SpecjaxError, match=message):
        ParallelConfig.for_target(LAYER, **settings)
