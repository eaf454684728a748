"""The commands that train pocket's heads and build its datastore."""

import pytest

from recipes.pocket import datastore, heads
from specjax.core.errors import SpecjaxError
from specjax.datastore import load_datastore
from specjax.hub import pocket_folder
from specjax.pocket import corpus

WEIGHTS = pocket_folder().parent


@pytest.mark.parametrize("name", heads.SHIPPED)
def test_a_shipped_head_is_written_as_it_is_in_the_package(name, tmp_path):
    heads.ship(WEIGHTS / name, tmp_path / name)
    [written], [shipped] = (sorted(f.glob(f"{name}/*.safetensors")) for f in (tmp_path, WEIGHTS))
    assert written.name == shipped.name
    assert written.read_bytes() == shipped.read_bytes()


def test_a_run_starts_from_runs_before_it():
    names = list(heads.RECIPES)
    for number, recipe in enumerate(heads.RECIPES.values()):
        assert {recipe.start, recipe.texts} - {None} <= set(names[:number])
    assert set(heads.SHIPPED.values()) <= set(names)


def test_an_unknown_run_is_refused_before_any_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(heads.subprocess, "run", None)
    with pytest.raises(SpecjaxError, match="run 'eagel' is unknown; choose from eagle, "):
        heads.build(heads.Options(tmp_path, only=("eagle", "eagel")))


def test_a_failed_run_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(heads.sys, "executable", "false")
    with pytest.raises(SpecjaxError, match="run eagle failed"):
        heads.build(heads.Options(tmp_path, only=("eagle", "medusa")))


def test_the_datastore_holds_pieces_of_the_training_modules(tmp_path):
    datastore.build(datastore.Options(tmp_path / "made", num_tokens=500))
    made = load_datastore(tmp_path / "made")
    assert 500 <= made.num_tokens < 1500
    assert made.num_documents < len(corpus.pieces(held_out=False))
    assert made.fingerprint == load_datastore(WEIGHTS / "datastore").fingerprint
