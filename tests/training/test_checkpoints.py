"""Checkpoints: the newest and the best are kept, and a corrupt one is skipped."""

import resource
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.core.folder import RunFolder
from specjax.training import checkpoints
from specjax.training.run_folder import TrainingRun, open_run
from tests.training.test_loop import damage

SCORES = {1: 1.5, 2: 3.0, 3: None, 4: 2.0, 5: None, 6: None}


def state(step: int) -> dict:
    return {"params": {"weight": jnp.full(3, float(step))}}


@pytest.fixture
def run(tmp_path):
    """Six checkpoints, three of them measured; the two newest and the best are left."""
    with checkpoints.manager_of(tmp_path / "checkpoints", keep_last=2) as manager:
        for step, score in SCORES.items():
            checkpoints.write(manager, step, state(step), {"next": step}, score)
        manager.wait_until_finished()
        yield TrainingRun(RunFolder(tmp_path), manager)


def test_the_newest_and_the_best_are_kept(run):
    assert sorted(run.manager.all_steps()) == [2, 5, 6]
    assert checkpoints.scores(run.manager) == {2: 3.0}
    step, score, best = run.best(state(0))
    assert (step, score) == (2, 3.0)
    assert np.array_equal(best["params"]["weight"], np.full(3, 2.0))


def test_what_was_written_comes_back(run):
    read, position = checkpoints.read(run.manager, 6, state(0))
    assert np.array_equal(read["params"]["weight"], np.full(3, 6.0))
    assert position == {"next": 6}


def test_another_checksum_is_a_corrupt_checkpoint(run, monkeypatch):
    monkeypatch.setattr(checkpoints, "checksum", lambda state: 0)
    with pytest.raises(SpecjaxError, match=r"^checksum mismatch$"):
        checkpoints.read(run.manager, 6, state(0))


def test_a_corrupt_one_does_not_hide_the_others(run, tmp_path):
    damage(tmp_path, 2, "truncated")
    with pytest.raises(SpecjaxError):
        checkpoints.read(run.manager, 2, state(0))
    with checkpoints.manager_of(tmp_path / "checkpoints", keep_last=2) as again:
        assert sorted(again.all_steps()) == [2, 5, 6]
        assert checkpoints.scores(again) == {}
        assert TrainingRun(RunFolder(tmp_path), again).best(state(0)) is None


def test_the_next_best_replaces_a_corrupt_one(tmp_path, capsys):
    with checkpoints.manager_of(tmp_path / "checkpoints", keep_last=3) as manager:
        run = TrainingRun(RunFolder(tmp_path), manager)
        for step, score in ((1, 1.0), (2, 3.0), (3, 2.0)):
            checkpoints.write(manager, step, state(step), None, score)
        manager.wait_until_finished()
        for file in (tmp_path / "checkpoints" / "2" / "state").rglob("*"):
            if file.is_file():
                file.unlink()
        found = run.best(state(0))
    assert found is not None
    step, score, best = found
    assert (step, score) == (3, 2.0)
    assert np.array_equal(best["params"]["weight"], np.full(3, 3.0))
    [reported] = capsys.readouterr().err.splitlines()
    assert reported.startswith("specjax: Skipped corrupt checkpoint 2 (")


def test_nothing_is_warned_of_where_nothing_is_measured(tmp_path, caplog):
    with checkpoints.manager_of(tmp_path / "checkpoints", keep_last=2) as manager:
        checkpoints.write(manager, 1, state(1), None, None)
        manager.wait_until_finished()
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


def test_a_full_disk_leaves_the_last_whole_checkpoint_and_one_line(tmp_path, caplog):
    class Batches:
        get_state = staticmethod(lambda: None)

    weight = {"weight": jax.random.normal(jax.random.key(0), (200_000,))}
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_run(tmp_path, {}) as run:
        run.save(1, weight, Batches, None)
        run.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))  # writing more fails
        try:
            with pytest.raises(SpecjaxError) as caught:
                run.save(2, weight, Batches, None)
                run.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert "cannot be written (File too large); free some space and go on" in str(caught.value)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()] == ["1"]
    with open_run(tmp_path, {}) as run:
        step, restored = run.restored(jax.tree.map(jnp.zeros_like, weight), None)
    assert step == 1 and np.array_equal(restored["weight"], weight["weight"])


def test_of_many_corrupt_arrays_only_the_first_is_reported(monkeypatch):
    """TensorStore reports the others to an event loop that the first has closed."""
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    with checkpoints.quiet():
        for text in ("Event loop is closed", "of something else"):
            sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError(text)))
    assert [str(each.exc_value) for each in printed] == ["of something else"]
    assert sys.unraisablehook == printed.append
