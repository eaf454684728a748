"""The length classifier: its data read prefix by prefix, its loss, its scores, its folder."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.models.fingerprint import FrozenModel
from specjax.models.heads.length_classifier import features_of
from specjax.models.io.classifier import load_classifier
from specjax.training import draft_features
from specjax.training.draft_features import ContinuedPrompt, DraftFeatures, read_drafts
from specjax.training.objectives import length_classifier
from specjax.training.objectives.length_classifier import ClassifierTraining, fit, scores_of
from tests.decoding.tiny import plain_pass
from tests.decoding.tiny import target as tiny

LENGTH = 40  # tokens of the slow reading


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(draft_features, "CHUNK", 16)


def frozen(seed: int, **settings) -> FrozenModel:
    return FrozenModel(*tiny(seed=seed, layers=1, **settings), fingerprint=f"tiny-{seed}")


def slow_probs(prefix: list[int]) -> np.ndarray:
    """The draft's distribution after `prefix`, from a separate run."""
    tokens, draft = np.zeros((1, LENGTH), np.int32), frozen(1)
    tokens[0, : len(prefix)] = prefix
    logits = np.asarray(plain_pass(draft.params, tokens, draft.model)[0].logits)[0, len(prefix) - 1]
    likelihood = np.exp(logits - logits.max())
    return likelihood / likelihood.sum()


@cache
def texts() -> tuple[ContinuedPrompt, ...]:
    """The draft guesses about two tokens in three; the second text spans two chunks."""
    numbers = np.random.default_rng(2)
    found = []
    for prompt_length, count in ((5, 9), (9, 20), (3, 0), (2, 1)):
        whole = numbers.integers(0, 40, prompt_length).tolist()
        for _ in range(count):
            likely = int(np.argmax(slow_probs(whole)))
            whole.append(likely if numbers.random() < 0.67 else int(numbers.integers(40)))
        found.append(ContinuedPrompt(whole[:prompt_length], whole[prompt_length:]))
    return tuple(found)


def test_data_equals_a_reading_prefix_by_prefix():
    data, by_count = (read_drafts(texts(), frozen(1), kind) for kind in ("draft", "generation"))
    drafts, rows, counts = [], [], []
    for number, (prompt, continuation) in enumerate(texts()):
        since_mismatch = 0
        for count, token in enumerate(continuation):
            drafts.append(slow_probs([*prompt, *continuation[:count]]))
            counts.append(count)
            is_match = int(np.argmax(drafts[-1])) == token
            rows.append((is_match, since_mismatch, number))
            since_mismatch = since_mismatch + 1 if is_match else 0
    assert len(rows) == 30
    np.testing.assert_array_equal(np.stack([data.is_match, data.depth, data.prompt], axis=1), rows)
    for found, positions in ((data, data.depth), (by_count, np.array(counts))):
        expected = features_of(jnp.asarray(np.stack(drafts)), jnp.asarray(positions))
        np.testing.assert_allclose(found.features, expected, rtol=1e-3, atol=1e-5)
    assert 8 < data.is_match.sum() < 27  # both kinds were seen


def test_nothing_is_learned_beyond_the_positions_of_the_draft():
    model, params = tiny(seed=1, layers=1)
    model = model.clone(config=replace(model.config, max_position_embeddings=12))
    data = read_drafts(texts(), FrozenModel(model, params, "short"))
    assert np.bincount(data.prompt).tolist() == [13 - 5, 13 - 9, 0, 1]


def test_other_vocabularies_and_prompts_without_continuation_are_rejected(tmp_path):
    with pytest.raises(SpecjaxError, match="vocabulary of 24 tokens, the target one of 40"):
        other = frozen(1, vocab_size=24)
        length_classifier.train_classifier(frozen(0), other, [], continuations, QUICK, tmp_path)
    with pytest.raises(SpecjaxError, match="continued no prompt"):
        read_drafts([ContinuedPrompt([1, 2], [])], frozen(1))


def made_up() -> DraftFeatures:
    """Tokens are accepted where the draft is sure of them; 50 per prompt."""
    numbers, count = np.random.default_rng(4), 2000
    probs = numbers.dirichlet(np.full(30, 0.05), size=2 * count).astype(np.float32)
    probs = probs[abs(probs.max(axis=1) - 0.5) > 0.1][:count]  # none is in doubt
    position = numbers.integers(0, 20, count)
    is_match = probs.max(axis=1) > 0.5
    return DraftFeatures(
        np.asarray(features_of(jnp.asarray(probs), jnp.asarray(position))),
        is_match,
        position,
        np.repeat(np.arange(40), 50),
    )


def test_what_can_be_learned_is_learned_from_whole_prompts_of_both_kinds():
    data = made_up()
    training, validation = draft_features.split_by_prompt(data, 0.15, seed=1)
    assert len(set(validation.prompt)) == 6
    assert not set(training.prompt) & set(validation.prompt)
    assert len(training.is_match) + len(validation.is_match) == len(data.is_match)
    settings = ClassifierTraining(hidden_size=16, num_steps=400, learning_rate=0.04)
    params, scores = fit(data, settings)
    assert scores["f1"] > 0.98
    assert scores["static_f1"] < 0.8
    assert params["hidden"]["kernel"].shape == (12, 16)
    for is_match, kind in ((True, "accepted"), (False, "rejected")):
        same = replace(data, is_match=np.full_like(data.is_match, is_match))
        with pytest.raises(SpecjaxError, match=f"would be {kind}.*give more or other prompts"):
            fit(same, settings)


def test_scores_are_counted():
    predicted, accepted = np.array([[1, 1, 1, 0, 0], [1, 0, 1, 1, 0]], bool)
    assert scores_of(predicted, accepted) == pytest.approx(
        {"precision": 2 / 3, "recall": 2 / 3, "f1": 2 / 3}
    )
    assert scores_of(np.zeros(3, bool), np.zeros(3, bool))["f1"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_the_best_threshold_and_static_length_are_the_best(seed):
    numbers = np.random.default_rng(seed)
    accepted = numbers.random(60) < 0.4
    confidence = np.round(0.3 * accepted + 0.7 * numbers.random(60), 1).astype(np.float32)
    tried = [scores_of(confidence >= cut, accepted)["f1"] for cut in np.arange(-0.05, 1.1, 0.1)]
    best = length_classifier.best_threshold(confidence, accepted)
    assert scores_of(confidence >= best, accepted)["f1"] == max(tried)
    depth = draft_features.run_lengths(accepted)
    lengths = [scores_of(depth < length, accepted)["f1"] for length in range(1, 61)]
    length = length_classifier.best_static_length(depth, accepted)
    assert scores_of(depth < (60 if length is None else length), accepted)["f1"] == max(lengths)


QUICK = ClassifierTraining(hidden_size=8, num_steps=20, batch_size=16, validation_fraction=0.4)


def continuations(prompts):
    table = {tuple(text.prompt): text.continuation for text in texts()}
    return [table[tuple(prompt)] for prompt in prompts]


def test_a_classifier_is_trained_and_saved(tmp_path):
    out, prompts = tmp_path / "disco", [text.prompt for text in texts()[:3]]
    train = partial(length_classifier.train_classifier, frozen(0), frozen(1))
    trained = train(prompts, continuations, QUICK, out)
    loaded = load_classifier(out)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, dict(loaded.params), dict(trained.params)))
    assert loaded.threshold == trained.threshold == loaded.scores["threshold"]
    assert (loaded.target, loaded.draft, loaded.position) == ("tiny-0", "tiny-1", "draft")
    assert (loaded.recipe["num_tokens"], loaded.recipe["hidden_size"]) == (29, 8)
    assert (out / "metrics.jsonl").exists()
    again = train(prompts, continuations, QUICK, out, resume=True)
    assert again.scores == trained.scores
