"""Checkpoints: the newest and the best are kept, and a corrupt one is skipped."""

import resource
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.training.checkpoints import Checkpoints
from specjax.training.run_folder import TrainingRun, open_run
from tests.training.test_loop import truncate


def state(step: int) -> dict:
    return {"params": {"weight": jnp.full(3, float(step))}}


def saved(folder: Path, keep_last: int, scores) -> Checkpoints:
    written = Checkpoints(str(folder / "checkpoints"), keep_last)
    for step, score in scores.items():
        written.write(step, state(step), {"next": step}, score)
    written.wait()
    return written


def test_a_corrupt_one_does_not_hide_the_others(tmp_path):
    """Keeps the two newest of six checkpoints, and the best of the three that were measured."""
    kept = saved(tmp_path, 2, {1: 1.5, 2: 3.0, 3: None, 4: 2.0, 5: None, 6: None})
    assert (kept.steps(), kept.scores()) == ([6, 5, 2], {2: 3.0})
    truncate(tmp_path, 2)
    with kept, pytest.raises(SpecjaxError):
        kept.read(2, state(0))
    with Checkpoints(kept.place, keep_last=2) as again:
        assert again.steps() == [6, 5, 2]
        assert again.scores() == {}
        assert TrainingRun(checkpoints=again).best(state(0)) is None


def test_of_equal_ones_the_newest_is_the_best_whatever_was_saved_between(tmp_path):
    for number, scores in enumerate(({1: 1.5, 3: 1.5}, {1: 1.5, 2: None, 3: 1.5})):
        with saved(tmp_path / str(number), 2, scores) as kept:
            assert TrainingRun(checkpoints=kept).best(state(0))[0] == 3


def test_the_next_best_replaces_a_corrupt_one(tmp_path, capsys):
    with saved(tmp_path, 3, {1: 1.0, 2: 3.0, 3: 2.0}) as kept:
        for file in (tmp_path / "checkpoints" / "2" / "state").rglob("*"):
            if file.is_file():
                file.unlink()
        step, score, best = TrainingRun(checkpoints=kept).best(state(0))
    assert (step, score) == (3, 2.0)
    assert np.array_equal(best["params"]["weight"], np.full(3, 3.0))
    assert "skipped corrupt checkpoint 2 (" in capsys.readouterr().err


def test_a_full_disk_leaves_the_last_whole_checkpoint_and_one_line(tmp_path, caplog):
    class Batches:
        get_state = staticmethod(lambda: None)
        set_state = staticmethod(lambda state: None)

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
    assert "cannot be written (File too large); free some space and" in str(caught.value)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()] == ["1"]
    with open_run(tmp_path, {}) as run:
        step, restored = run.restore(jax.tree.map(jnp.zeros_like, weight), Batches)
    assert step == 1 and np.array_equal(restored["weight"], weight["weight"])
