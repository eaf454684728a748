"""The loop: an interrupted run ends with the bits of a whole one, whatever interrupted it."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tensorboardX.record_writer import RecordWriter

from specjax.core.errors import SpecjaxError
from specjax.core.interrupts import Stopped
from specjax.training.data import from_function
from specjax.training.loop import Evaluation, LoopOptions, Trained, train

OPTIONS = LoopOptions(num_steps=12, save_every=4, log_every=3, eval_every=100, seed=9)


class Killed(Exception):
    pass


def batch_at(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    inputs = rng.normal(size=(8, 3)).astype(np.float32)
    return {"inputs": inputs, "wanted": inputs @ np.float32([1.0, -2.0, 0.5])}


def loss_fn(params, frozen, batch, key):
    """Linear regression with noise on its inputs, so that the keys count too."""
    noisy = batch["inputs"] + 0.01 * jax.random.normal(key, batch["inputs"].shape)
    errors = noisy @ params["weight"] * frozen["scale"] - batch["wanted"]
    return jnp.mean(errors**2), {"per_depth": jnp.abs(errors[:2])}


def run(
    folder, stop_at: int | None = None, scale: float = 1.0, batch_of=None, **settings
) -> Trained:
    def batch(step: int):
        if step == stop_at:
            raise Killed
        return (batch_of or batch_at)(step)

    start = {"weight": jnp.zeros(3)}
    trained = train(
        loss_fn,
        start,
        from_function(batch),
        optax.adamw(optax.cosine_decay_schedule(1e-1, 12)),
        settings.pop("options", OPTIONS),
        folder,
        **{"frozen": {"scale": jnp.asarray(scale)}} | settings,
    )
    assert np.array_equal(start["weight"], np.zeros(3))  # not given away
    return trained


@cache
def whole() -> Trained:
    """A run without a folder or an interruption."""
    return run(None)


def same_bits(one: Trained, other: Trained) -> bool:
    return np.array_equal(one.params["weight"], other.params["weight"])


def test_an_interrupted_run_ends_with_the_bits_of_a_whole_one(tmp_path):
    assert same_bits(run(tmp_path / "whole", config={"rate": 1}), whole())
    for stop_at in (2, 7, 11):  # before the first checkpoint, and with metrics beyond the newest
        with pytest.raises(Killed):
            run(tmp_path / "cut", stop_at)
    assert same_bits(run(tmp_path / "cut"), whole())
    assert same_bits(run(tmp_path / "cut", stop_at=0), whole())  # finished: nothing is run again
    written, again = ((tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "cut"))
    assert written == again
    lines = [json.loads(line) for line in written.splitlines()]
    steps = [(line["step"], len(line["per_depth"])) for line in lines]
    assert steps == [(step, 2) for step in (3, 6, 9, 12)]
    assert json.loads((tmp_path / "whole" / "config.json").read_text()) == {"rate": 1}
    [start] = json.loads((tmp_path / "whole" / "run.json").read_text())["starts"]
    assert (start["versions"]["jax"], start["command"]) == (jax.__version__, sys.argv)
    assert any((tmp_path / "whole" / "tensorboard").iterdir())


KILLED = """
import sys, time
sys.path.insert(0, {root!r})
from tests.training.test_loop import EACH_STEP, batch_at, run
run({folder!r}, batch_of=lambda step: time.sleep(0.02) or batch_at(step), options=EACH_STEP)
"""
EACH_STEP = LoopOptions(num_steps=60, save_every=1, log_every=1, eval_every=100, seed=9)


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_with_the_same_bits(tmp_path):
    """Every step saves, so that most kills fall into the middle of a save."""
    code = KILLED.format(root=str(Path(__file__).parents[2]), folder=str(tmp_path / "cut"))
    rng = np.random.default_rng(0)
    checkpoints = tmp_path / "cut" / "checkpoints"
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ})
        known = set(checkpoints.glob("*"))
        while process.poll() is None and set(checkpoints.glob("*")) <= known:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.4))
        process.send_signal(signal.SIGKILL)
        process.wait()
    resumed = run(tmp_path / "cut", options=EACH_STEP)
    assert same_bits(resumed, run(None, options=EACH_STEP))
    lines = (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 61))
    starts = json.loads((tmp_path / "cut" / "run.json").read_text())["starts"]
    assert len(starts) == 3


def truncate(folder: Path, step: int) -> None:
    """Cuts all files of a checkpoint in half."""
    for file in (folder / "checkpoints" / str(step)).rglob("*"):
        if file.is_file():
            os.truncate(file, file.stat().st_size // 2)


def test_a_corrupt_checkpoint_is_skipped_and_the_run_stops_if_all_are(tmp_path, capsys):
    run(tmp_path)
    for file in (tmp_path / "checkpoints" / "12" / "state").glob("**/d/*"):  # the arrays
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 255
        file.write_bytes(content)
    assert same_bits(run(tmp_path), whole())
    assert "specjax: skipped corrupt checkpoint 12 (" in capsys.readouterr().err
    assert same_bits(run(tmp_path, stop_at=0), whole())  # it was written anew
    for step in (8, 12):
        truncate(tmp_path, step)
    with pytest.raises(SpecjaxError, match=r"no checkpoint in .* can be read") as caught:
        run(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path):
    scores = iter([1.0, 3.0, 2.0, 1.5, 1.0, 0.5])
    seen = []

    def measure(params):
        seen.append(np.asarray(params["weight"]))
        return {"score": next(scores), "other": [1, 2]}

    options = LoopOptions(num_steps=12, save_every=100, log_every=3, eval_every=2, keep_last=1)
    trained = run(tmp_path, options=options, evaluation=Evaluation(measure, "score"))
    assert (trained.best_step, trained.best_score) == (4, 3.0)
    assert np.array_equal(trained.best_params["weight"], seen[1])
    assert np.array_equal(trained.params["weight"], seen[-1])
    kept = {file.name for file in (tmp_path / "checkpoints").iterdir()}
    assert kept == {"4", "12"}


def test_checkpoints_elsewhere_outlive_the_folder(tmp_path):
    """As on a machine that is lost with its disk; another config does not go on from them."""
    options = replace(OPTIONS, checkpoints=str(tmp_path / "elsewhere"))
    with pytest.raises(Killed):
        run(tmp_path / "lost", stop_at=7, options=options)
    assert not (tmp_path / "lost" / "checkpoints").exists()
    shutil.rmtree(tmp_path / "lost")
    with pytest.raises(SpecjaxError, match=r"elsewhere holds another run \(rate"):
        run(tmp_path / "other", options=options, config={"rate": 2})
    assert same_bits(run(tmp_path / "new", options=options), whole())
    lines = (tmp_path / "new" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["step"] == 6  # after that of step 4


def test_a_url_that_cannot_be_written_is_one_line(tmp_path):
    options = replace(OPTIONS, checkpoints="nosuch://bucket/run")
    with pytest.raises(SpecjaxError, match=r"checkpoints cannot be kept in nosuch://bucket/run"):
        run(tmp_path / "run", options=options)


def test_accumulated_batches_make_the_step_of_one_large_batch():
    def halves(step: int):
        whole = batch_at(step // 2)
        part = slice(0, 4) if step % 2 == 0 else slice(4, 8)
        return {name: rows[part] for name, rows in whole.items()}

    def quiet(params, frozen, batch, key):
        errors = batch["inputs"] @ params["weight"] - batch["wanted"]
        return jnp.mean(errors**2), {}

    start = {"weight": jnp.zeros(3)}
    optimizer = optax.sgd(0.1)
    many = optax.MultiSteps(optimizer, 2).gradient_transformation()
    whole = train(quiet, start, from_function(batch_at), optimizer, OPTIONS)
    parts = train(quiet, start, from_function(halves), many, OPTIONS, accumulate=2)
    np.testing.assert_allclose(parts.params["weight"], whole.params["weight"], atol=1e-6)


def test_a_loss_that_is_not_finite_stops_the_run():
    with pytest.raises(SpecjaxError, match="loss is nan at step 3"):
        run(None, scale=float("nan"))


def test_a_step_that_does_not_fit_in_memory_gives_advice():
    def huge(params, frozen, batch, key):
        column = params["weight"].sum() + jnp.arange(2.0**17)[:, None]
        wide = jnp.broadcast_to(column, (2**17, 2**17))  # XLA of JAX 0.12 fails at more
        return jnp.max(jnp.sin(wide @ wide)), {}

    message = r"a training step needs at least .* GB \(arguments .*, workspace .*; turn this"
    given = {"weight": jnp.zeros(3)}, from_function(batch_at), optax.sgd(0.1), OPTIONS
    with pytest.raises(SpecjaxError, match=message):
        train(huge, *given, advice="turn this")


def test_a_signal_ends_the_step_saves_and_explains_how_to_continue(tmp_path):
    """No step is lost, though checkpoints are rarer; the run resumes to the same result."""

    def batch(step: int):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch_at(step)

    with pytest.raises(Stopped, match="stopped after step 5, which is saved") as at:
        run(tmp_path / "run", batch_of=batch)
    assert at.value.exit_code == 128 + signal.SIGTERM
    taken: list[int] = []
    resumed = run(tmp_path / "run", batch_of=lambda step: taken.append(step) or batch_at(step))
    assert same_bits(resumed, whole())
    assert taken[0] == 5
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_full_disk_ends_the_run_wherever_it_shows_first(tmp_path, monkeypatch):
    """A writer of TensorBoard in another thread would die and leave the run waiting for it."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordWriter, "flush", full)
    with pytest.raises(SpecjaxError, match=r"tensorboard \(No space left"):
        run(tmp_path, options=OPTIONS)
