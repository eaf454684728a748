"""Details of objectives: features, EAGLE's noise, HASS's steps, EAGLE-3's draft vocabulary."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.settings import SettingError
from specjax.decoding.drafter import Params
from specjax.models.config import Rope
from specjax.models.heads.eagle import EagleHead
from specjax.models.heads.layered import DRAFT_TOKENS
from specjax.models.transformer import Transformer
from specjax.training.losses import soft_cross_entropy
from specjax.training.objectives.base import hidden_states
from specjax.training.objectives.eagle import EagleTraining
from specjax.training.objectives.eagle3 import Eagle3Training
from specjax.training.objectives.hass import HassTraining
from specjax.training.objectives.hydra import HydraTraining
from specjax.training.objectives.medusa import MedusaTraining
from specjax.training.objectives.parallel_spec import ParallelEagleTraining, ParallelMedusaTraining
from tests.decoding import heads
from tests.models import test_eagle_head as simulation
from tests.training import cases
from tests.training.cases import CASES, EXAMPLES, FROZEN, HASS, KEY, TARGET, VOCAB, batch_of

DRAFTED = tuple(range(1, VOCAB, 3))
WINDOWED = Transformer(replace(TARGET.config, sliding_window=3))


def features(batch, model=TARGET, params=FROZEN):
    places = (jnp.asarray(batch[name]) for name in ("tokens", "positions", "segments"))
    return hidden_states(model, params, (-1,), *places)[:, :, 0]


def test_packed_texts_are_those_of_plain_passes():
    """Here with a window; the definition in `test_objectives.py` has plain passes without one."""
    read, batch = jax.jit(partial(features, model=WINDOWED)), batch_of()
    tokens = jnp.asarray(batch_of(cases.ALONE)["tokens"])
    alone = heads.features_of(Params(FROZEN, None), tokens, WINDOWED)
    found, merged = (
        cases.each_alone(read(batch | {"segments": segments}))
        for segments in (batch["segments"], np.minimum(batch["segments"], 1))
    )
    for text, example in enumerate(EXAMPLES):
        size = len(example.tokens)
        np.testing.assert_allclose(found[text, :size], alone[text, :size], atol=1e-5)
    assert np.abs(found - cases.clean_features()).max() > 0.1  # the window shows
    assert np.abs(merged - found)[2].max() > 0.1  # texts that see each other


def test_a_rotation_depends_on_the_length_of_a_text_without_its_padding():
    rope = {"rope": Rope(rope_type="dynamic", factor=8.0), "max_position_embeddings": 2}
    target, (head, params) = Transformer(replace(TARGET.config, **rope)), heads.eagle_head(VOCAB, 1)
    head = EagleHead(replace(head.config, layers=replace(head.config.layers, **rope)))
    batch, size = batch_of(cases.ALONE[:1]), len(EXAMPLES[0].tokens)
    places = [jnp.asarray(batch[name]) for name in ("tokens", "positions", "segments")]

    @jax.jit
    def outputs(tokens, *places):
        features = hidden_states(target, FROZEN, (-1,), tokens, *places)[:, :, 0]
        return head.step(params, target.embed(FROZEN, tokens), features, (), *places)[0][:, :size]

    cut = [place[:, :size] for place in places]
    np.testing.assert_allclose(outputs(*places), outputs(*cut), atol=1e-5)


def test_no_gradient_reaches_the_target():
    gradient = jax.jit(jax.grad(lambda params: jnp.sum(features(batch_of(), params=params))))
    for leaf in jax.tree.leaves(gradient(FROZEN)):
        np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


def test_noise_is_uniform_narrower_in_longer_texts_and_none_without_a_width():
    """As wide as asked for at 512 tokens, half of it to each side."""
    width = 0.2
    noise = cases.each_alone(cases.noisy_features(width)) - cases.clean_features()
    for example, own in zip(EXAMPLES, noise, strict=True):
        length = len(example.tokens)
        own = own[:length] / (width * 512 / length)
        assert np.abs(own).max() <= 0.5 + 1e-4
        # Of 128 numbers or more: the largest, their mean and their spread, as of a uniform law.
        assert min(own.max(), -own.min()) > 0.45
        assert abs(own.mean()) < 4 * 12**-0.5 / own.size**0.5
        np.testing.assert_allclose(own.std(), 12**-0.5, rtol=0.15)
        assert len(np.unique(own)) > 0.99 * own.size
    clean = cases.each_alone(cases.noisy_features(0.0))
    np.testing.assert_allclose(clean, cases.clean_features(), atol=1e-5)


@cache
def measured(training: EagleTraining = HASS):
    """Loss, gradient and metrics of the packed texts."""
    return replace(CASES["hass"], training=training).measure()


@pytest.mark.slow
def test_a_gradient_between_steps_would_be_caught():
    attached = partial(simulation.steps, detach=False)
    expected, expected_gradient, _ = cases.definition(
        CASES["hass"], partial(cases.by_drafting, drafts=attached)
    )
    loss, gradient, _ = measured()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert simulation.gradients_differ_by(gradient, expected_gradient) > 1e-2


@pytest.mark.slow
def test_token_alignment_of_every_slot_is_drafting_from_own_tokens(monkeypatch):
    def own_token(feature):
        return jnp.argmax(TARGET.logits(FROZEN, feature), axis=-1)

    own_draft = partial(simulation.draft_from, own_token=own_token)
    monkeypatch.setattr(simulation, "draft_from", own_draft)
    aligned = replace(HASS, token_alignment=1.0)
    expected, expected_gradient, of_steps = cases.definition(
        replace(CASES["hass"], training=aligned)
    )
    loss, gradient, metrics = measured(aligned)
    cases.assert_same((loss, gradient), (expected, expected_gradient))
    accuracy = [step["accuracy"] for step in of_steps]
    np.testing.assert_allclose(metrics["accuracy"], accuracy, rtol=1e-6)
    assert abs(expected - measured()[0]) > 1e-1  # other tokens than the text's


def test_token_alignment_takes_the_token_drafted_one_slot_before():
    drafted = jnp.arange(2 * 4000.0).reshape(2, 4000, 1)
    text = -1 - drafted
    segments = jnp.asarray(np.repeat(np.arange(8), 500)[None].repeat(2, axis=0))
    training = replace(HASS, token_alignment=0.3)
    aligned = np.asarray(training.align_tokens(text, drafted, segments, KEY))
    is_drafted = aligned >= 0
    np.testing.assert_array_equal(aligned, np.where(is_drafted, drafted - 1, text))
    assert not is_drafted[:, ::500].any()  # the first slot of a text has nothing before it
    assert abs(is_drafted.mean() - 0.3 * 499 / 500) < 0.02


@pytest.mark.parametrize("name", ["eagle", "parallel-eagle"])
def test_losses_over_a_draft_vocabulary_are_those_of_an_lm_head_with_its_rows(name):
    case = CASES[name]
    head = type(case.head)(replace(case.head.config, draft_vocab_size=len(DRAFTED)))
    params = case.params | {DRAFT_TOKENS: jnp.asarray(DRAFTED)}
    rows = FROZEN | {"lm_head": {"weight": cases.TABLE[jnp.asarray(DRAFTED)]}}
    measure = jax.jit(case.training.loss(head, TARGET))
    loss, _ = measure(params, FROZEN, case.batch, KEY)
    with_all = jax.jit(case.training.loss(case.head, TARGET))
    expected, _ = with_all(case.params, rows, case.batch, KEY)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    others = params | {DRAFT_TOKENS: jnp.asarray(DRAFTED) - 1}
    assert abs(loss - measure(others, FROZEN, case.batch, KEY)[0]) > 1e-3


def test_a_draft_vocabulary_counts_in_hass_but_not_its_order():
    """Although drafted tokens are read here."""
    training, case = replace(HASS, token_alignment=1.0), CASES["hass"]
    head = type(case.head)(replace(case.head.config, draft_vocab_size=len(DRAFTED)))
    measure, drafted = jax.jit(training.loss(head, TARGET)), jnp.asarray(DRAFTED)
    loss, reverse, other = (
        measure(case.params | {DRAFT_TOKENS: tokens}, FROZEN, case.batch, KEY)[0]
        for tokens in (drafted, drafted[::-1], drafted - 1)
    )
    np.testing.assert_allclose(loss, reverse, rtol=1e-5)
    assert abs(loss - other) > 1e-3


@pytest.mark.slow
def test_the_targets_distribution_is_limited_to_the_draft_vocabulary():
    """Slots whose most likely token is outside of it teach nothing."""
    head, params = heads.eagle3_head(VOCAB, 1, DRAFTED)
    training = Eagle3Training(draft_vocab=len(DRAFTED), test_steps=1)
    case = cases.Case(training, head, params, cases.by_drafts, ({"logit_loss": 1.0},))
    loss, metrics = jax.jit(training.loss(head, TARGET))(params, FROZEN, case.batch, KEY)
    text, slot = np.transpose(cases.counted())
    logits = np.asarray(cases.by_drafts(case, params)(0, text, slot))
    target_logits = cases.clean_features()[text, slot + 1] @ np.asarray(cases.TABLE).T
    drafted, best = np.array(DRAFTED), target_logits.argmax(axis=-1)
    losses = soft_cross_entropy(jnp.asarray(logits), jnp.asarray(target_logits[:, drafted]))
    teaches = np.isin(best, drafted)
    assert 0 < teaches.sum() < len(teaches)
    np.testing.assert_allclose(loss, losses[teaches].sum() / len(teaches), rtol=2e-5)
    is_right = drafted[logits.argmax(axis=-1)] == best
    np.testing.assert_allclose(metrics["accuracy"], [is_right.mean()], rtol=1e-5)


def test_the_target_runs_only_where_its_features_are_read():
    case = CASES["parallel-medusa"]
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, FROZEN)
    broken |= {name: FROZEN[name] for name in ("embed_tokens", "lm_head")}
    loss = jax.jit(ParallelMedusaTraining().loss(case.head, TARGET))
    found, metrics = loss(case.params, broken, case.batch, KEY)
    assert np.isfinite(found) and metrics["accuracy"].shape == (heads.MASKS + 1,)


@pytest.mark.parametrize(
    ("kind", "published"),
    [
        (EagleTraining, {"feature_weight": 1.0, "logit_weight": 0.1, "noise": 0.2}),
        (HassTraining, {"align_steps": 3, "step_decay": 1.0, "token_alignment": 0.0}),
        (HassTraining, {"top_loss": "top-k", "top_weight": 1.0, "top_k": 10}),
        (MedusaTraining, {"head_decay": 0.8, "top_weight": 0.0}),
        (HydraTraining, {"num_heads": 4, "num_layers": 4, "lm_heads": True}),
        (ParallelEagleTraining, {"num_masks": 4, "num_layers": 1}),
    ],
)
def test_the_defaults_are_the_published_ones(kind, published):
    assert vars(kind()).items() >= published.items()


@pytest.mark.parametrize(
    "kind, values, name",
    [
        (EagleTraining, {"noise": -1.0}, "noise"),  # the constructor checks fields
        (HassTraining, {"top_loss": "bild", "top_k": 1}, "top_k"),  # and how they combine
    ],
)
def test_options_out_of_bounds_are_named(kind, values, name):
    with pytest.raises(SettingError) as caught:
        kind(**values)
    assert caught.value.field == name
