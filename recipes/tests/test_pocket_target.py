"""The command that trains pocket: its refusals, its files, and when it evaluates."""

import json
from dataclasses import replace

import pytest

import specjax
from recipes.pocket import corpus, tokenizer
from recipes.pocket import target as recipe
from recipes.pocket.target import Options, Phase, Recipe
from specjax.core.errors import SpecjaxError

TEXTS = ["def f(x):\n    return x\n"] * 4
TINY = Recipe(
    replace(recipe.DRAFT, vocab_size=300, hidden_size=128, num_hidden_layers=1),
    (Phase(7, 2, 16, (0.5, 0.0, 0.5)),),
    warmup_steps=1,
    decay_steps=2,
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "foo", "--out", "run"], "--size 'foo' is unknown"),
        (["--size", "draft", "--out", "n" * 300], "File name too long"),
        (["--out", "run", "--vocabulary", "missing"], "missing holds no tokenizer.json"),
    ],
)
def test_a_bad_command_is_one_line_and_exit_code_2(
    monkeypatch, tmp_path, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["target", *arguments])
    with pytest.raises(SystemExit, match="2"):
        recipe.main(recipe.build, Options, None)
    captured = capsys.readouterr()
    assert captured.err.startswith("specjax: ") and message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.slow
def test_a_run_saves_and_evaluates_each_at_its_own_pace(tmp_path, monkeypatch):
    monkeypatch.setitem(recipe.RECIPES, "draft", TINY)
    monkeypatch.setattr(tokenizer, "tokenizer_texts", lambda: TEXTS)
    monkeypatch.setattr(corpus, "pieces", lambda held_out: tuple(TEXTS))
    monkeypatch.setattr(recipe, "evaluate", lambda *given: {"accuracy": 1.0})
    recipe.build(Options(tmp_path / "run", "draft", save_every=3, evaluate_every=2))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == [2, 3, 4, 6, 6, 7, 7]
    assert [row["step"] for row in rows if "accuracy" in row] == [2, 4, 6, 7]
    assert [row["step"] for row in rows if "loss" in row] == [3, 6, 7]
    target = specjax.load(tmp_path / "run" / "model")
    assert target.tokenizer("def")["input_ids"]
    record = json.loads((tmp_path / "run" / "model" / "recipe.json").read_text())
    assert record["history"] == rows
    with pytest.raises(SpecjaxError, match="model already exists and is not an empty folder"):
        recipe.build(Options(tmp_path / "run", "draft"))
