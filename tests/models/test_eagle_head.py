"""The EAGLE head in training sees what it sees while it drafts, shown by drafting.

`drafts` is the slow truth: from every slot on it lets `head.run` draft one token after another with
a cache, as decoding does. `steps` is what HASS trains: whole texts at once, n steps.
"""

from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from specjax.models.cache import KVCache
from specjax.models.config import TransformerConfig
from specjax.models.heads import HeadWeights
from specjax.models.heads.eagle import EagleConfig, EagleHead
from specjax.models.heads.hydra import HydraConfig
from specjax.models.heads.parallel import ParallelConfig
from specjax.models.target import causal_rows
from specjax.models.transformer import Transformer

BATCH, LENGTH, VOCAB, WIDTH, STEPS = 2, 9, 40, 32, 4
LAYER = TransformerConfig(VOCAB, WIDTH, 48, 1, 4, 2, 8)  # two query heads to each key-value head
TARGET = Transformer(LAYER)
PLAIN: Any = EagleHead(EagleConfig(LAYER))
DEEP: Any = EagleHead(EagleConfig(replace(LAYER, num_hidden_layers=2), fc_bias=True))


class Texts(NamedTuple):
    """Rows of slots: the token behind each, and the target's feature of the token before."""

    tokens: Any  # [B, T]
    features: Any  # [B, T, D]
    positions: Any  # [B, T]
    segments: Any  # [B, T]


def texts(lengths: tuple[int, ...] = (LENGTH,), seed: int = 0) -> Texts:
    """Two rows, each of texts of these lengths in a row."""
    numbers = np.random.default_rng(seed)
    slots = sum(lengths)
    return Texts(
        tokens=jnp.asarray(numbers.integers(0, VOCAB, (BATCH, slots))),
        features=jnp.asarray(numbers.normal(size=(BATCH, slots, WIDTH)), jnp.float32),
        positions=jnp.asarray([[*np.concatenate([np.arange(each) for each in lengths])]] * BATCH),
        segments=jnp.asarray([[*np.repeat(np.arange(len(lengths)), lengths)]] * BATCH),
    )


@cache
def weights(head) -> tuple[Any, Any]:
    """Params of the head, large enough for its context to matter, and of the target."""
    numbers = np.random.default_rng(1)

    def draw(path, leaf):
        noise = numbers.normal(size=leaf.shape)
        is_norm = "norm" in jax.tree_util.keystr(path)
        return jnp.asarray(0.12 * noise if leaf.ndim == 2 else is_norm + 0.3 * noise, leaf.dtype)

    shapes = jax.eval_shape(head.initialise, jax.random.key(0))
    table = {"embed_tokens": {"weight": jnp.asarray(numbers.normal(size=(VOCAB, WIDTH)), "f4")}}
    return jax.tree_util.tree_map_with_path(draw, shapes), table


@pytest.mark.parametrize(
    "num_layers, kind", [(1, EagleConfig), (1, ParallelConfig), (0, HydraConfig)]
)
def test_layers_of_a_head_are_like_the_targets_and_see_all_of_the_text(num_layers, kind):
    kinds = ("sliding_attention", "full_attention")
    target = replace(LAYER, num_hidden_layers=2, sliding_window=4, layer_types=kinds)
    assert kind.for_target(target) == kind(replace(LAYER, num_hidden_layers=num_layers))


# ---- Training: n steps over whole texts ----------------------------------------------------------


def steps(head, params, target_params, text: Texts, num_steps=STEPS, turn=0, detach=True):
    """Returns the predictions of each step, `[N, B, T, D]`, from those of the step before.

    The first slot of a text keeps the target's feature. `turn` and `detach` are for mutants.
    """
    is_first = jnp.pad(text.segments[:, 1:] != text.segments[:, :-1], ((0, 0), (1, 0)))
    is_first = is_first.at[:, 0].set(True)[..., None]
    embedded = TARGET.embed(target_params, text.tokens)
    features, streams, predictions = text.features, (), []
    for step in range(num_steps):
        positions = text.positions + turn * step
        predicted, own = head.step(params, embedded, features, streams, positions, text.segments)
        predictions.append(predicted)
        streams = (*streams, own)
        later = jnp.pad(predicted[:, :-1], ((0, 0), (1, 0), (0, 0)))
        features = jnp.where(is_first, text.features, later)
        features = lax.stop_gradient(features) if detach else features
    return jnp.stack(predictions)


# ---- Decoding: one slot after another, with a cache ----------------------------------------------


def draft_from(head, params, target_params, text: Texts, first_drafted, own_token=None):
    """Predictions `[T, B, D]` where slots from `first_drafted` on take the head's own features.

    There the token is the text's, or what `own_token` makes of the feature drafted before it.
    """
    batch, length = text.tokens.shape

    def feed(carry, slot):
        cache, drafted = carry
        true = lax.dynamic_index_in_dim(text.features, slot, axis=1, keepdims=False)
        feature = jnp.where(slot < first_drafted, true, lax.stop_gradient(drafted))
        token = lax.dynamic_slice_in_dim(text.tokens, slot, 1, axis=1)
        if own_token is not None:
            token = jnp.where(slot < first_drafted, token, own_token(drafted)[:, None])
        rows = causal_rows(token, jnp.full((batch,), slot))
        predicted, cache = head.run(
            HeadWeights(params, TARGET, target_params), rows, feature[:, None], cache
        )
        return (cache.advance(jnp.ones(batch, jnp.int32)), predicted[:, 0]), predicted[:, 0]

    empty = KVCache.create(head.config.layers, batch, length)
    return lax.scan(feed, (empty, jnp.zeros_like(text.features[:, 0])), jnp.arange(length))[1]


def drafts(head, params, target_params, text: Texts, num_steps=STEPS):
    """Returns the expected result of `steps`: token n of a draft that ends at slot r, for all n, r.

    A draft begins with a target's feature at slot r - (n - 1), or at slot 0 if that lies before it.
    """
    length = text.tokens.shape[1]
    from_each = lax.map(
        lambda first: draft_from(head, params, target_params, text, first),
        jnp.arange(1, length + 1),
    )
    ends = jnp.arange(length)
    predictions = []
    for step in range(1, num_steps + 1):
        begins = jnp.maximum(ends - (step - 1), 0)  # the last slot with a feature of the target
        predictions.append(from_each[begins, ends].swapaxes(0, 1))
    return jnp.stack(predictions)


def predictions_and_gradient(predict, head, params, target_params):
    """All predictions, and the gradient of the sum over steps of their mean squares."""

    def loss(params):
        predictions = predict(head, params, target_params, texts())
        return jnp.sum(jnp.mean(predictions**2, axis=(1, 2, 3))), predictions

    gradient, predictions = jax.grad(loss, has_aux=True)(params)
    return predictions, gradient


@cache
def truth():
    return jax.jit(partial(predictions_and_gradient, drafts, PLAIN))(*weights(PLAIN))


def gradients_differ_by(found, expected) -> float:
    """The largest difference, against the largest entry of the same leaf."""
    differences = jax.tree.map(lambda a, b: np.abs(a - b).max() / np.abs(b).max(), found, expected)
    return max(jax.tree.leaves(differences))


# ---- Mutants: the comparison above fails for wrong contexts --------------------------------------


def slow_attention(tables, query, streams, segments):
    """`aligned_attention` by a table `[n - 1, r, t]`: of n streams, the one in which r sees t."""
    source = tables[len(streams) - 1]
    slots = np.arange(LENGTH)
    # The seeing slot, the one that it sees, then text, head and width.
    keys, values = (
        jnp.repeat(jnp.stack(each)[source, :, :, slots[None, :]], 2, axis=3)
        for each in zip(*streams, strict=True)
    )
    scores = jnp.einsum("bath,tsbah->bats", query, keys, precision="highest")
    is_seen = (segments[:, :, None] == segments[:, None, :]) & np.tri(LENGTH, dtype=bool)[None]
    scores = jnp.where(is_seen[:, None], scores * query.shape[-1] ** -0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("bats,tsbah->bath", weights, values, precision="highest")


@jax.jit
def by_tables(tables, params, target_params):
    """The predictions of `steps`, and the gradient, where slots see those that the tables name."""
    with pytest.MonkeyPatch.context() as patch:
        attention = staticmethod(partial(slow_attention, tables))
        patch.setattr(EagleHead, "attend_in_training", attention)
        return predictions_and_gradient(steps, PLAIN, params, target_params)


def by_rule(stream_of):
    """As `by_tables`; `stream_of` gets the slots' distance and the newest stream's number."""
    slots = np.arange(LENGTH)
    distance = np.maximum(slots[:, None] - slots, 0)
    tables = np.stack([np.vectorize(stream_of)(distance, n) for n in range(STEPS)])
    return by_tables(tables, *weights(PLAIN))


def right(distance, newest):
    return max(newest - distance, 0)


WRONG = {
    "far slots in the newest stream": lambda distance, newest: (
        newest - distance * (distance < newest)
    ),
    "all in the newest stream": lambda distance, newest: newest,
    "all in the target's stream": lambda distance, newest: 0,
    "all but itself in the target's stream": lambda distance, newest: newest * (distance == 0),
    "near slots in reverse": lambda distance, newest: (
        min(distance + 1, newest) * (distance < newest)
    ),
    "one slot late": lambda distance, newest: min(max(newest + 1 - distance, 0), newest),
}


def test_the_rule_written_out_is_the_draft():
    found, gradient = by_rule(right)
    np.testing.assert_allclose(found, truth()[0], atol=1e-5)
    assert gradients_differ_by(gradient, truth()[1]) < 1e-5


@pytest.mark.parametrize("rule", WRONG)
def test_a_wrong_context_is_caught(rule):
    found, gradient = by_rule(WRONG[rule])
    np.testing.assert_allclose(found[0], truth()[0][0], atol=1e-5)  # one stream: no choice
    assert np.abs(found - truth()[0]).max() > 1e-2
    assert gradients_differ_by(gradient, truth()[1]) > 1e-3


def test_texts_are_each_drafted_alone_at_their_slots_and_are_caught_if_not():
    """Positions alone do not separate texts, segments do; and RoPE counts slots, not steps."""
    together = texts((4, 4), seed=3)
    run = partial(jax.jit(partial(steps, DEEP)), *weights(DEEP))
    draft = partial(jax.jit(partial(drafts, DEEP)), *weights(DEEP))
    merged = together._replace(segments=together.segments * 0)
    found, of_merged, turned = run(together, turn=0), run(merged, turn=0), run(together, turn=1)
    assert (np.abs(of_merged - found)[:, :, 4:].max(axis=(1, 3)) > 1e-2).all()
    assert np.abs(turned - found).max() > 1e-2
    for place in (slice(4), slice(4, 8)):
        alone = draft(Texts(*(each[:, place] for each in together)))
        np.testing.assert_allclose(found[:, :, place], alone, atol=1e-5)
