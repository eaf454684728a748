"""`specjax train eagle` and `hass` on a tiny random target: what a run leaves, and how it goes on.

The texts are random words, so nothing is learned; what a head learns is tested with its loss.
"""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.bench.acceptance import Acceptance, advice
from specjax.cli import TRAIN, train_heads
from specjax.cli.train_heads import TrainHead, evaluation
from specjax.core.errors import SpecjaxError
from specjax.data.conversations import USER, Conversation, Turn
from specjax.decoding.drafters.eagle2 import Eagle2
from specjax.loading.methods import METHODS
from specjax.loading.targets import load
from specjax.models.heads.eagle import EagleConfig, EagleHead
from specjax.models.io.formats.eagle import EAGLE
from specjax.models.io.head_files import load_head, read_about
from specjax.training import loop
from specjax.training.data import DataOptions
from specjax.training.examples import Example
from specjax.training.objectives.eagle import EagleTraining
from tests.cli.target import CONFIG
from tests.cli.training import SHORT, contents


@pytest.fixture(scope="module")
def eagle_run(tmp_path_factory, train) -> Path:
    out = tmp_path_factory.mktemp("runs") / "eagle"
    assert train("eagle", out, *SHORT) == 0
    return out


def metrics_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# ---- What a run leaves --------------------------------------------------------------------------


def test_metrics_hold_loss_accuracy_speed_and_measurements(eagle_run):
    rows = metrics_of(eagle_run)
    logged = [row for row in rows if "loss" in row]
    assert [row["step"] for row in logged] == [1, 2, 3, 4, 5, 6]
    for row in logged:
        assert np.isfinite(row["loss"]) and row["tokens_per_second"] > 0
        assert [0 <= share <= 1 for share in row["accuracy"]] == [True]
    measured = [row for row in rows if "accepted_length" in row]
    assert [row["step"] for row in measured] == [3, 6]
    for row in measured:
        assert 1 <= row["accepted_length"] <= 7  # EAGLE-2's depth and the bonus
        assert all(0 <= rate <= 1 for rate in row["acceptance_rates"])


def test_the_head_has_the_published_layout(eagle_run, tiny):
    head, params = load_head(eagle_run / "head", EAGLE, CONFIG, "float32")
    assert head.config == EagleConfig.for_target(CONFIG)
    new = head.initialise(jax.random.key(0))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, new)
    assert not np.array_equal(params["fc"]["weight"], new["fc"]["weight"])
    about = read_about(eagle_run / "head")
    measured = {row["step"]: row.get("accepted_length") for row in metrics_of(eagle_run)}
    assert about["score"] == measured[about["step"]] == max(filter(None, measured.values()))
    assert about["recipe"]["method"] == about["method"] == "eagle"


def test_a_run_can_be_drafted_with(eagle_run, generate):
    settings = (
        option for name in ("top_k=2", "depth=2", "num_tokens=4") for option in ("--set", name)
    )
    drafter = ("--method", "eagle2", "--drafter", str(eagle_run), *settings)
    values = generate("best value", *drafter, "--compare")
    assert values["method"] == "eagle2"
    assert values["identical"] is True


@pytest.mark.slow
def test_hass_logs_the_accuracy_of_every_step_and_starts_from_a_head(eagle_run, train, tmp_path):
    """The texts are limited to the target's 320 positions."""
    out = tmp_path / "hass"
    start = ("--start", str(eagle_run), "--align-steps", "3", "--longest", "9999")
    assert train("hass", out, *SHORT, *start, "--num-steps", "2", "--limit", "20") == 0
    assert len(metrics_of(out)[0]["accuracy"]) == 3
    config = json.loads((out / "config.json").read_text())
    assert config["method"] == "hass"
    assert config["data"]["longest"] == CONFIG.max_position_embeddings
    assert isinstance(config["start"], int)
    _, before = load_head(eagle_run / "head", EAGLE, CONFIG, "float32")
    _, after = load_head(out / "head", EAGLE, CONFIG, "float32")
    moved = np.max(np.abs(before["fc"]["weight"] - after["fc"]["weight"]))
    assert 0 < moved < 1e-3  # two steps at this rate from there, not a new head


def test_runs_last_as_published_and_hass_comes_in_stages_too():
    names = ("eagle", "eagle3", "hass", "hass-stage-1", "hass-stage-2")
    commands = [TRAIN.load()[name](out=Path("x")) for name in names]
    assert [command.epochs for command in commands] == [20, 40, 40, 40, 10]
    hass = commands[2:]
    assert [(command.method, command.training.align_steps) for command in hass] == [("hass", 3)] * 3
    assert [command.training.top_weight for command in hass] == [1, 0, 1]
    assert [command.optimizer.learning_rate for command in hass] == [3e-5, 3e-5, 1e-5]


def test_epochs_count_batches_of_texts_or_packed_tokens():
    """The last batch of an epoch may not be full."""
    examples = [Example(np.zeros(n, np.int32), np.ones(n, bool)) for n in (40, 60, 100)]
    command = TrainHead(training=EagleTraining(), out=Path("x"), epochs=3.0)
    for packing, num_steps in ((True, 3 * 200 / 100 / 2), (False, 3 * 2)):
        batches = DataOptions(batch_size=2, longest=100, packing=packing)
        assert command.loop_for(examples, batches).num_steps == num_steps
        without_answer = Example(np.zeros(100, np.int32), np.zeros(100, bool))
        assert command.loop_for([*examples, without_answer], batches).num_steps == num_steps


# ---- Going on -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method, changed, message",
    [
        ("eagle", (), "already holds a run; add --resume to continue it"),
        ("eagle", ("--resume", "--learning-rate", "1e-3"), "(learning_rate was "),
        ("eagle", ("--resume", "--eval-tokens", "9"), "(eval_tokens was 8, now 9"),
        ("hass", ("--resume",), "align_steps"),
    ],
)
def test_a_folder_with_a_run_is_left_alone(eagle_run, train, error_line, method, changed, message):
    before = contents(eagle_run)
    assert train(method, eagle_run, *SHORT, *changed) == 2
    assert message in error_line()
    assert contents(eagle_run) == before


def test_a_finished_run_is_not_trained_again(eagle_run, train, monkeypatch, capsys):
    monkeypatch.setattr(loop, "train_step", lambda *_: lambda *_: pytest.fail("a step was taken"))
    before = contents(eagle_run)
    assert train("eagle", eagle_run, *SHORT, "--resume") == 0
    printed = capsys.readouterr()
    assert "best at step" in printed.out
    assert printed.err == ""
    after = contents(eagle_run)
    *starts, _ = json.loads(after["run.json"])["starts"]
    assert starts == json.loads(before["run.json"])["starts"]
    same = [name for name in before if name != "run.json" and not name.startswith("tensorboard")]
    assert [after[name] for name in same] == [before[name] for name in same]


def test_a_killed_run_ends_with_the_same_head(eagle_run, train, tmp_path):
    """As if it had been killed after step 4; the training loop's tests kill at random moments."""
    out = shutil.copytree(eagle_run, tmp_path / "run")
    shutil.rmtree(out / "head")
    shutil.rmtree(out / "checkpoints" / "6")
    assert train("eagle", out, *SHORT, "--resume") == 0
    assert contents(out / "head") == contents(eagle_run / "head")
    events = b"".join(file.read_bytes() for file in (out / "tensorboard").iterdir())
    started_at_5 = b"\x10\x05:\x02\x08\x01"  # an event's step, and START of its session
    assert started_at_5 in events  # TensorBoard hides what the first start has from here on


def test_other_heads_and_other_biases_are_no_start(eagle_run, train, tmp_path, error_line):
    head = shutil.copytree(eagle_run / "head", tmp_path / "head")
    config = json.loads((head / "config.json").read_text())
    for changes, message in (
        ({"draft_vocab_size": 99}, "EAGLE-3"),
        ({"hidden_size": 64}, "target of hidden_size 64, but this one has 32"),
        ({"specjax": {"target": "another"}}, "was trained for target another"),
    ):
        (head / "config.json").write_text(json.dumps(config | changes))
        assert train("eagle", tmp_path / "run", *SHORT, "--start", str(head)) == 2
        assert message in error_line()
    with_bias = ("--start", str(eagle_run), "--fc-bias")
    assert train("eagle", tmp_path / "run", *SHORT, *with_bias) == 2
    assert "fc_bias False, but the options request True; set --fc-bias" in error_line()
    assert not (tmp_path / "run").exists()


def test_an_interrupted_distillation_is_a_run(train, tmp_path, capsys):
    """Although it has no config yet."""
    (tmp_path / "distilled.jsonl.json").write_text("{}")
    assert train("eagle", tmp_path, *SHORT, "--distill", "--distill-tokens", "12") == 2
    assert "already holds a run; add --resume" in capsys.readouterr().err
    assert list(contents(tmp_path)) == ["distilled.jsonl.json"]


# ---- Measuring ----------------------------------------------------------------------------------


def test_a_head_of_which_nothing_is_accepted_is_reported(tiny, capsys, monkeypatch):
    target, measured = load(tiny), []
    long, short = (Conversation((Turn(USER, text),)) for text in ("best " * 400, "best"))
    drafter = Eagle2(EagleHead(EagleConfig.for_target(CONFIG)), top_k=2, depth=2, num_tokens=4)

    def acceptance(target, drafter, params, prompts, max_new_tokens):
        measured.extend(prompts)
        return Acceptance((0, 80, 0, 0))

    monkeypatch.setattr(train_heads, "acceptance", acceptance)
    measure = evaluation(target, drafter, [long, short, short], 320, 8).measure
    assert measure({}) == {"accepted_length": 1.0, "acceptance_rates": [0.0]}
    assert capsys.readouterr().err == f"specjax: {advice(1.0, 80)}; or train longer\n"
    assert len(measured) == 2  # those that fit
    for prompt, longest in ((long, 320), (short, 9)):
        with pytest.raises(SpecjaxError, match=f"none of 1 prompts .* texts of {longest}"):
            evaluation(target, drafter, [prompt], longest, 8)


def test_every_method_with_a_head_can_be_trained():
    """But for eagle2, whose head is that of eagle."""
    with_heads = {name for name, row in METHODS.items() if row.head}
    trainings = {name: row.training for name, row in METHODS.items() if row.training}
    assert trainings.keys() == with_heads - {"eagle2"}
    assert len(set(trainings.values())) == len(trainings)
    assert {METHODS[name].head.kind for name in trainings} == {
        format.kind for format in METHODS.head_formats
    }
