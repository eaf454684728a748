import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.models.heads.length_classifier import LengthClassifier, features_of
from specjax.models.io import classifier
from specjax.models.io.classifier import METADATA, WEIGHTS, load_classifier, save_classifier
from tests.models.checkpoints import failure
from tests.models.heads import drawn, rewrite

TRAINED = classifier.TrainedClassifier(
    params=drawn(LengthClassifier(7)),
    hidden_size=7,
    threshold=0.375,
    position="generation",
    target="8x3x192-aaaaaaaa",
    draft="2x2x128-bbbbbbbb",
    scores={"f1": 0.9, "static_length": None},
    recipe={"num_steps": 3},
    specjax_version="0.1.0",
)


@pytest.mark.parametrize("vocab_size", [40, 4])
def test_features_are_the_ten_largest_the_entropy_and_the_log_of_the_position(vocab_size):
    numbers = np.random.default_rng(0)
    probs = numbers.dirichlet(np.full(vocab_size, 0.3), size=5).astype(np.float32)
    probs[0] = np.eye(vocab_size)[1]  # certain: zeros must not become NaN
    position = np.array([0, 1, 5, 40, 3000])
    found = jax.jit(features_of)(jnp.asarray(probs), jnp.asarray(position))
    for row in range(5):
        largest = sorted(probs[row].tolist(), reverse=True)[:10]
        entropy = -sum(p * np.log(p) for p in probs[row].astype(np.float64) if p > 0)
        expected = [*largest, *[0] * (10 - len(largest)), entropy, np.log(1 + position[row])]
        np.testing.assert_allclose(found[row], expected, rtol=1e-4, atol=1e-6)


def test_what_is_saved_is_loaded_and_is_a_network_of_two_layers(tmp_path):
    save_classifier(TRAINED, tmp_path / "disco")
    loaded = load_classifier(tmp_path / "disco")
    jax.tree.map(np.testing.assert_array_equal, loaded.params, TRAINED.params)
    features = np.random.default_rng(1).normal(size=(2, 3, 12)).astype(np.float32)
    first, last = (jax.tree.map(np.asarray, loaded.params[name]) for name in ("hidden", "logit"))
    hidden = np.maximum(features @ first["kernel"] + first["bias"], 0)
    expected = (hidden @ last["kernel"] + last["bias"])[..., 0]
    assert np.abs(expected).min() > 0
    found = jax.jit(loaded.model.run)(loaded.params, features)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert repr(loaded) == repr(TRAINED)  # which holds all but the params


def test_a_classifier_of_other_models_is_refused():
    models = TRAINED.target, TRAINED.draft
    TRAINED.check_owner(*models)
    for owners in ((models[0], "other"), ("other", models[1])):
        with pytest.raises(SpecjaxError) as caught:
            TRAINED.check_owner(*owners)
        assert all(name in str(caught.value) for name in (*models, "other"))


def _rewrite(folder, **changes):
    values = json.loads((folder / METADATA).read_text())
    (folder / METADATA).write_text(json.dumps(values | changes))


DAMAGES = {
    "no metadata": lambda folder: (folder / METADATA).unlink(),
    "no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "metadata cut": lambda folder: (folder / METADATA).write_text('{"format": "spec'),
    "foreign": lambda folder: _rewrite(folder, format="specjax datastore 1"),
    "key missing": lambda folder: _rewrite(folder, target=None),
    "kind unknown": lambda folder: _rewrite(folder, position="nowhere"),
    "threshold huge": lambda folder: _rewrite(folder, threshold=10**400),
    "other width": lambda folder: _rewrite(folder, hidden_size=8),
    "weights cut": lambda folder: os.truncate(folder / WEIGHTS, 500),
    "weight gone": lambda folder: rewrite(folder, **{"logit.bias": ...}),
    "weight nan": lambda folder: rewrite(folder, **{"logit.bias": np.full(1, np.nan, "f4")}),
    "weight double": lambda folder: rewrite(folder, **{"logit.bias": np.ones(1)}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_a_one_line_error_that_names_it(tmp_path, damage):
    save_classifier(TRAINED, tmp_path / "disco")
    DAMAGES[damage](tmp_path / "disco")
    assert "train" in failure(load_classifier, tmp_path / "disco")


def test_the_classifier_of_a_run_is_read_once_the_run_has_finished(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(SpecjaxError, match=r"not finished .* with --resume"):
        load_classifier(tmp_path)
    save_classifier(TRAINED, tmp_path / "classifier")
    assert load_classifier(tmp_path).threshold == TRAINED.threshold
