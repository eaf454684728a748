"""`specjax train` for Medusa, Hydra and ParallelSpec, and what can be done with such heads."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from specjax.models.heads.eagle import EagleConfig, EagleHead
from specjax.models.io.formats.eagle import EAGLE
from specjax.models.io.formats.parallel import PARALLEL
from specjax.models.io.head_files import load_head, read_about, save_head
from tests.cli.target import CONFIG
from tests.cli.training import MEASURED

pytestmark = pytest.mark.slow

TWO_STEPS = (
    *("--batch-size", "2", "--longest", "96", "--accumulate", "1"),
    *("--num-steps", "2", "--eval-every", "2", *MEASURED),
)
SHAPES = {
    "medusa": ("--num-heads", "2"),
    "eagle3": ("--test-steps", "2", "--draft-vocab", "30"),
    "hydra": ("--num-heads", "2", "--num-layers", "2", "--prefix"),
    "parallel-medusa": ("--num-masks", "2"),
    "parallel-eagle": ("--num-masks", "2", "--draft-vocab", "30"),
}


@pytest.fixture(scope="module")
def runs(train, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    for method, shape in SHAPES.items():
        assert train(method, folder / method, *TWO_STEPS, *shape) == 0
    return {method: folder / method for method in SHAPES}


@pytest.mark.parametrize("method", SHAPES)
def test_a_run_leaves_a_head_that_drafts(runs, generate, method):
    rows = [json.loads(line) for line in (runs[method] / "metrics.jsonl").open()]
    depths = len(next(row for row in rows if "accuracy" in row)["accuracy"])
    assert depths == (3 if "parallel" in method else 2)
    assert read_about(runs[method] / "head")["method"] == method
    drafter = ("--method", method, "--drafter", str(runs[method]))
    assert generate("best value", *drafter, "--compare")["identical"] is True


@pytest.mark.parametrize("count", [0, 20])
def test_a_head_with_an_lm_head_keeps_its_draft_vocabulary(runs, train, tmp_path, capsys, count):
    arguments = (*TWO_STEPS, *SHAPES["eagle3"], "--start", str(runs["eagle3"]))
    assert train("eagle3", tmp_path / "run", *arguments, "--draft-vocab", str(count)) == 2
    assert f"draft_vocab_size 30, but the options request {count}" in capsys.readouterr().err


def test_eagles_parallel_head_starts_from_an_eagle_head(train, tmp_path):
    eagle, start = EagleHead(EagleConfig.for_target(CONFIG)), tmp_path / "eagle"
    before = eagle.initialise(jax.random.key(0))
    save_head(start, EAGLE, eagle, before, "float32", target=CONFIG)
    arguments = ("--num-masks", "2", "--start", str(start), "--learning-rate", "1e-9")
    assert train("parallel-eagle", tmp_path / "parallel", *TWO_STEPS, *arguments) == 0
    _, after = load_head(tmp_path / "parallel" / "head", PARALLEL, CONFIG, jnp.float32)
    kept = {name: after[name] for name in before}
    assert jax.tree.all(jax.tree.map(partial(jnp.allclose, atol=1e-7), before, kept))
    assert after.keys() - before.keys() == {"mask_embeddings", "mask_hidden"}


def test_a_quantised_target_trains_heads_by_top_k_loss_on_its_answers(
    train, tmp_path, generate, capsys
):
    arguments = ("--num-heads", "2", "--top-weight", "1", "--distill", "--distill-tokens", "4")
    run = tmp_path / "run"
    assert train("medusa", run, *TWO_STEPS, *arguments, "--quantize", "int8") == 0
    assert "top_loss" in json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert (run / "distilled.jsonl").stat().st_size > 0
    capsys.readouterr()
    generated = generate("count = 1", "--method", "medusa", "--drafter", str(run), "--compare")
    assert generated["identical"] is True
