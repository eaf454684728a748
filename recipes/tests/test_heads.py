"""The commands that train the heads of pocket and of SmolLM2."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest

from recipes import heads
from recipes.pocket.heads import POCKET
from recipes.smollm2.heads import SMOLLM2
from recipes.smollm2.losses import COMPARISON
from recipes.smollm2.many_heads import MANY
from specjax.cli import main
from specjax.cli.train_heads import TrainHead
from specjax.core.errors import SpecjaxError
from specjax.loading.hub import pocket_folder
from specjax.loading.methods import METHODS
from tests.decoding.tiny import slow_except

WEIGHTS = pocket_folder().parent
RUNS = [(recipe, name) for recipe in (POCKET, SMOLLM2, MANY, COMPARISON) for name in recipe.runs]
QUICK = (POCKET, "hass-3-distilled"), (POCKET, "medusa-distilled"), (SMOLLM2, "eagle3")


@pytest.mark.parametrize("recipe, name", slow_except(RUNS, *QUICK))
def test_the_commands_parse(recipe, name, monkeypatch):
    seen, run = [], recipe.runs[name]
    monkeypatch.setattr(TrainHead, "run", lambda self: seen.append(self))
    command = heads.command_of(recipe, name, Path("/runs"), "pocket", "texts.jsonl")
    python, dash, module, *arguments = command
    assert (python, dash, module) == (sys.executable, "-m", "specjax")
    assert main(arguments) == 0
    [parsed] = seen
    assert parsed.method == run.method
    assert type(parsed.training) is METHODS[parsed.method].training
    assert parsed.out == Path("/runs") / name
    assert parsed.resume and parsed.loop.num_steps is not None
    start = dict(pairwise(run.settings)).get("--start")
    assert parsed.start == (f"/runs/{run.start}/head" if run.start else start)
    assert parsed.data == (f"/runs/{run.texts}/distilled.jsonl" if run.texts else "texts.jsonl",)
    assert parsed.distill == (name == "hass-3-distilled")
    if name.startswith("hass-") and name[-1].isdigit():
        assert parsed.training.align_steps == int(name[-1])


@pytest.mark.parametrize("recipe", [POCKET, SMOLLM2], ids=["pocket", "smollm2"])
def test_a_run_starts_from_runs_before_it(recipe):
    names = list(recipe.runs)
    for number, run in enumerate(recipe.runs.values()):
        assert {run.start, run.texts} - {None} <= set(names[:number])
    assert set(recipe.shipped.values()) <= set(names)


@pytest.mark.parametrize("name", slow_except(POCKET.shipped, "eagle", "medusa"))
def test_a_shipped_head_is_written_as_it_is_in_the_package(name, tmp_path):
    heads.ship(POCKET, WEIGHTS / name, tmp_path / name, "pocket", "unread")
    [written], [shipped] = (sorted(f.glob(f"{name}/*.safetensors")) for f in (tmp_path, WEIGHTS))
    assert written.name == shipped.name
    assert written.read_bytes() == shipped.read_bytes()


def test_an_unknown_run_stops_before_any_starts_and_a_failed_one_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(heads.sys, "executable", "false")
    unknown, failing = ("eagle", "eagel"), ("eagle",)
    for only, message in ((unknown, "run 'eagel' is unknown"), (failing, "eagle failed")):
        with pytest.raises(SpecjaxError, match=message):
            heads.build(POCKET, POCKET.options(out=tmp_path, data="x", only=only))
