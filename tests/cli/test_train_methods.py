"""`specjax train` for Medusa, Hydra and ParallelSpec, and what can be done with such heads."""

import json
import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.cli import main
from specjax.loading.methods import METHODS
from specjax.models.io.formats.eagle import EAGLE
from specjax.models.io.formats.parallel import PARALLEL
from specjax.models.io.head_files import detect_format, load_head, read_about
from tests.cli.target import CONFIG
from tests.cli.training import MEASURED, contents

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
    "parallel-eagle": ("--num-masks", "2"),
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


@pytest.mark.parametrize("method", ["hydra", "parallel-eagle"])
def test_a_run_goes_on_to_the_same_bits(runs, train, tmp_path, method):
    out = tmp_path / "again"
    arguments = (*TWO_STEPS, *SHAPES[method], "--save-every", "1")
    assert train(method, out, *arguments) == 0
    shutil.rmtree(out / "head")
    shutil.rmtree(out / "checkpoints" / "2")  # as if it had been killed after the first step
    assert train(method, out, *arguments, "--resume") == 0
    before, after = contents(runs[method] / "head"), contents(out / "head")
    weights = [name for name in before if name.endswith(".safetensors")]
    assert weights and all(before[name] == after[name] for name in weights)


@pytest.mark.parametrize("method", SHAPES)
def test_heads_are_converted_without_loss(runs, tiny, tmp_path, method, capsys):
    """To each layout, and read back from there."""
    head = runs[method] / "head"
    format = detect_format(head, METHODS.head_formats)
    assert format is METHODS[method].head
    _, params = load_head(head, format, CONFIG, jnp.float32)
    layouts = [name for name in format.layouts if name not in ("medusa", "hydra")]
    convert = ["convert", str(head), "--head-of", str(tiny)]
    for layout in layouts:
        out = tmp_path / layout
        assert main([*convert, str(out), "--layout", layout]) == 0
        _, again = load_head(out, format, CONFIG, jnp.float32)
        jax.tree.map(np.testing.assert_array_equal, params, again)
    capsys.readouterr()
    assert main([*convert, str(tmp_path / "x"), "--layout", "sglang"]) == 2
    assert f"use {', '.join(format.layouts)}" in capsys.readouterr().err


@pytest.mark.parametrize("method", SHAPES)
def test_a_head_of_another_kind_is_named(runs, tiny, method, error_line):
    """Whichever head is offered, the message says what it is and what is wanted."""
    for other, run in runs.items():
        if METHODS[other].head is METHODS[method].head:
            continue
        command = ["generate", "x", "--target", str(tiny), "--method", method]
        assert main([*command, "--drafter", str(run)]) == 2
        line = error_line()
        title = METHODS[other].head.signature.title
        assert f"describes {title}" in line or f"holds {title}" in line
        assert "give a" in line


def test_eagles_parallel_head_starts_from_an_eagle_head(train, runs, tmp_path, capsys):
    eagle = tmp_path / "eagle"
    assert train("eagle", eagle, *TWO_STEPS) == 0
    arguments = ("--num-masks", "2", "--start", str(eagle), "--learning-rate", "1e-9")
    assert train("parallel-eagle", tmp_path / "parallel", *TWO_STEPS, *arguments) == 0
    _, before = load_head(eagle / "head", EAGLE, CONFIG, jnp.float32)
    _, after = load_head(tmp_path / "parallel" / "head", PARALLEL, CONFIG, jnp.float32)
    for name in before:
        assert jax.tree.all(
            jax.tree.map(partial(jnp.allclose, atol=1e-7), before[name], after[name])
        )
    assert after.keys() - before.keys() == {"mask_embeddings", "mask_hidden"}
    capsys.readouterr()
    arguments = ("--num-masks", "3", "--start", str(runs["parallel-eagle"]))
    assert train("parallel-eagle", tmp_path / "other", *TWO_STEPS, *arguments) == 2
    assert "has num_masks 2, but the options request 3; set --num-masks" in capsys.readouterr().err


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
