import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.models.io.checkpoint import new_folder, restore_checkpoint, save_checkpoint

PARAMS = {
    "head": {"weight": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(2, jnp.bfloat16)},
    "steps": jnp.int32(7),
}
CONFIG = {"hidden_size": 3, "recipe": {"learning_rate": 1e-3, "layers": [1, 2]}}


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for got, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert isinstance(got, jax.Array)
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)


@pytest.fixture
def folder(tmp_path):
    save_checkpoint(tmp_path / "run" / "step_1", PARAMS, CONFIG)
    return tmp_path / "run" / "step_1"


def test_params_and_config_come_back_as_saved(folder):
    params, config = restore_checkpoint(folder)
    assert_same(params, PARAMS)
    assert config == CONFIG


def test_like_gives_structure_and_dtype(folder):
    like = {
        "head": {
            "weight": jax.ShapeDtypeStruct((2, 3), jnp.float16),
            "bias": jax.ShapeDtypeStruct((2,), jnp.float32),
        },
        "steps": jax.ShapeDtypeStruct((), jnp.int32),
    }
    params, _ = restore_checkpoint(folder, like)
    assert_same(params, jax.tree.map(lambda leaf, form: leaf.astype(form.dtype), PARAMS, like))


def test_tuples_come_back_through_like(tmp_path):
    pair = {"pair": (jnp.ones(2), jnp.zeros(3))}
    save_checkpoint(tmp_path / "step", pair, {})
    assert_same(restore_checkpoint(tmp_path / "step", pair)[0], pair)


def test_what_does_not_fit_like_is_told_at_once(folder):
    like = {"head": {"weight": jnp.ones((2, 4)), "scale": jnp.ones(2)}, "steps": jnp.int32(0)}
    with pytest.raises(SpecjaxError) as caught:
        restore_checkpoint(folder, like)
    message = str(caught.value)
    assert str(folder) in message
    assert "missing: head.scale;" in message
    assert "wrong shape: head.weight is (2, 3), expected (2, 4);" in message
    assert "unexpected: head.bias;" in message
    assert "\n" not in message


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(SpecjaxError, match=r"is not a checkpoint: it needs config\.json and"):
        restore_checkpoint(tmp_path)


def test_a_damaged_config_is_named(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(SpecjaxError, match=r"config\.json is not valid JSON .*download it again"):
        restore_checkpoint(folder)


@pytest.mark.parametrize("damage", ["_METADATA", "manifest.ocdbt", "d"])
def test_damaged_params_are_named(folder, damage):
    for path in (folder / "params").rglob("*"):
        if path.is_file() and damage in (path.name, path.parent.name):
            path.write_bytes(path.read_bytes()[:10])
    with pytest.raises(SpecjaxError) as caught:
        restore_checkpoint(folder)
    assert str(folder / "params") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_saving_over_something_is_refused(folder):
    with pytest.raises(SpecjaxError, match=r"step_1 already exists .* choose another name"):
        save_checkpoint(folder, PARAMS, CONFIG)
    assert_same(restore_checkpoint(folder)[0], PARAMS)


def test_a_new_folder_appears_only_when_it_is_complete(tmp_path):
    with new_folder(tmp_path / "out") as unfinished:
        (unfinished / "file").write_text("done")
        assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "done"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_folder_leaves_nothing_behind(tmp_path, error):
    with pytest.raises(error), new_folder(tmp_path / "out") as unfinished:
        (unfinished / "file").write_text("half")
        raise error
    assert not list(tmp_path.iterdir())
