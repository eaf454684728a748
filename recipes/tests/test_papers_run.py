"""`specjax reproduce` from end to end: a recipe that trains and measures, killed and resumed."""

import json
import signal
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from recipes.papers import recipe as recipe_module
from recipes.papers import run as papers_run
from recipes.papers.inputs import Inputs
from recipes.papers.options import RecipeOptions
from recipes.papers.recipe import Part
from specjax import SpecjaxError
from specjax.bench import run as run_module
from specjax.bench.measure import measure_trials
from specjax.cli import main
from specjax.core.interrupts import Stopped

SHARED = {
    "models": 'm = {target = "none/none", billions = 7.0, cache = [32, 4096]}',
    "data": "".join(
        f'[{name}]\ntitle = "{name.title()}"\nlicense = "MIT"\npage = "https://{name}"\n'
        f'sources = []\nfiles = ["{name}.jsonl"]\nwords = [9, 9]\n{more}\n'
        for name, more in {"edits": "", "texts": "sample = 100"}.items()
    ),
    "small-table-1": """
title = "Small, table 1"
device = "A100"
models = ["m"]
max_new_tokens = 24
metric = "accepted_length"
published = '''
method      | Edits    | More edits | Mean
PLD         | 2.0±0.1  | 2.5        | 2.25
EAGLE, own  | 3.0      | 3.5        | 3.25
Hydra       | 4.0      | 4.5        | 4.25
'''

[data]
"Edits" = "edits"
"More edits" = "edits"

[columns]
"Mean" = "accepted_length"

[methods]
"PLD" = {method = "pld"}
"EAGLE, own" = {method = "eagle2", head = "own", settings = {top_k = 1, num_tokens = 3, depth = 2}}
"Hydra" = {method = "hydra"}

[heads.own]
method = "eagle"
data = "texts"
""",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Recipes of our own, and their data."""
    folder = tmp_path / "papers"
    folder.mkdir()
    for name, text in SHARED.items():
        (folder / f"{name}.toml").write_text(text)
    rows = [{"prompt": f"count = {number}\nrun_length"} for number in range(2)]
    (folder / "edits.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rows = [{"prompt": "Rename it.", "response": f"for value in values: {n}"} for n in range(20)]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(recipe_module, "FOLDER", folder)
    caches = recipe_module.shared_models, recipe_module.shared_data
    for cached in caches:
        cached.cache_clear()
    yield folder
    for cached in caches:
        cached.cache_clear()


@pytest.mark.slow
def test_a_recipe_trains_measures_and_goes_on_where_it_was_killed(
    folder, tiny, tmp_path, capsys, monkeypatch
):
    out = tmp_path / "out"
    command = ["reproduce", "small-table-1", "--target", str(tiny), "--data", str(folder)]
    command += ["--limit", "1", "--runs", "1", "--out", str(out), "--train=--eval-tokens 4"]

    monkeypatch.setattr(jax, "clear_caches", lambda: None)  # both runs share what is compiled
    monkeypatch.setattr(run_module, "read_bandwidth", lambda: 1e10)  # reading it takes seconds

    def killed(*arguments):
        for count, turn in enumerate(measure_trials(*arguments)):
            if count == 1:
                raise Stopped(signal.SIGTERM)
            yield turn

    with monkeypatch.context() as patched:
        patched.setattr(run_module, "measure_trials", killed)
        assert main(command) == 143
    first = capsys.readouterr().err
    assert "Hydra is left out" in first and "specjax train eagle" in first
    assert "the same command goes on" in first
    [samples] = out.glob("bench/*/samples.jsonl")
    before = samples.read_text()
    assert main(command) == 0
    captured = capsys.readouterr()
    assert "specjax train" not in captured.err
    assert samples.read_text().startswith(before)
    assert samples.read_text().count("\n") == 2
    lines = (out / "small-table-1.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[-4:]]
    rows = {row[0]: row[1:] for row in cells}
    assert rows["Hydra"] == ["- / 4.00", "- / 4.50", "- / 4.25"]
    for name, published in (("PLD", ("2.00±0.10", "2.50", "2.25")), ("EAGLE, own", ("3.00",))):
        for cell, theirs in zip(rows[name], published, strict=False):
            own, rest = cell.split(" / ")
            assert rest.startswith(f"{theirs} (") and float(own) >= 1
    assert all(row in captured.out for row in ("PLD", "EAGLE, own", "Hydra"))


def test_a_named_drafter_replaces_the_head_of_a_recipe(folder, tmp_path):
    recipe = recipe_module.read_recipe("small-table-1")
    options = RecipeOptions(target="pocket", drafter=("eagle2=mine",), data=folder)
    run = papers_run.Reproduction(recipe, options, tmp_path / "out")
    sources = run.sources(run.parts[0], recipe.methods)
    assert sources["EAGLE, own"] == "mine"
    two = {**recipe.methods, "EAGLE, other": recipe_module.RecipeMethod("eagle2", head="other")}
    with pytest.raises(SpecjaxError, match="compares 2 heads of eagle2"):
        run.sources(run.parts[0], two)


def test_a_draft_length_is_tuned_for_one_target_and_its_texts(folder, tmp_path, monkeypatch):
    recipe, tuned = recipe_module.read_recipe("small-table-1"), []

    def tune(*_):
        tuned.append({"length": len(tuned)})
        return tuned[-1]

    monkeypatch.setattr(papers_run, "tune_length", tune)
    monkeypatch.setattr(papers_run, "load_drafter", lambda *_, **__: (None, None))
    monkeypatch.setattr(papers_run, "Workload", SimpleNamespace(of_tasks=lambda *_: None))
    monkeypatch.setattr(Inputs, "load", lambda *_: None)

    def length(target, recipe=recipe):
        options = RecipeOptions(target=target, drafter=("draft-model=small",), data=folder)
        run = papers_run.Reproduction(recipe, options, tmp_path / "out")
        return run.tuned_length(run.parts[0], folder / "edits.jsonl", rule="fixed")["length"]

    assert [length("a"), length("b"), length("a")] == [0, 1, 0]
    assert length("a", replace(recipe, max_new_tokens=9)) == 2


def test_a_column_whose_data_is_missing_is_left_out(folder, tmp_path, capsys):
    (folder / "texts.jsonl").unlink()
    titles = {"Edits": "edits", "Texts": "texts"}
    together = replace(recipe_module.read_recipe("small-table-1"), data=titles)
    apart = replace(together, model_of=dict.fromkeys(titles, "m"))  # each with its own model
    for recipe in (together, apart):
        inputs = Inputs(recipe, RecipeOptions(data=folder), tmp_path / "out")
        assert inputs.parts == [Part("m", ("Edits",))]
        assert "Texts is left out: it needs texts.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["small-table-1", "--model", "vicuna"], "has no model 'vicuna', but m"),
        (["small-table-1", "--drafter", "eagel=x"], "method 'eagel' is unknown"),
        (["small-table-1", "--limit", "0"], "--limit must be at least 1"),
        (["small-table-1"], "Edits is not on the hub; get it from https://edits"),
    ],
)
def test_what_cannot_be_run_is_one_line(folder, tmp_path, capsys, arguments, message):
    assert main(["reproduce", *arguments, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
