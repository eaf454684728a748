"""The questions of SmolLM2's benchmark."""

import json
from pathlib import Path

import pytest

from recipes.smollm2 import bench
from recipes.smollm2.bench import MT_BENCH, correction, questions_in, renaming, sources_at
from specjax.core.errors import SpecjaxError
from specjax.loading.methods import METHODS

PROGRAM = "def area(r):\r\n    return 3 * r * r"


def test_a_task_to_rename_names_the_one_function_and_shows_the_program():
    task = renaming(PROGRAM)
    assert "function `area` to `solve`" in task and "def area(r):\n    return" in task
    assert renaming(PROGRAM + "\ndef other(): pass") is None


def test_a_text_to_correct_differs_from_the_right_one_in_a_tenth_of_its_words():
    words = [f"word{number}" for number in range(200)]
    garbled = correction(" ".join(words)).split("\n\n")[1].split()
    wrong = [place for place, word in enumerate(garbled) if word != words[place]]
    assert len(garbled) == bench.NUM_EDITED_WORDS and wrong == [4, 14, 24, 34, 44, 54]


def test_every_kind_has_its_questions_and_a_missing_file_is_named(tmp_path):
    kinds = (*MT_BENCH, "translation", "summarization", "qa", "math_reasoning", "rag")
    asked = [{"category": kind, "turns": [f"{kind} {n}"]} for kind in kinds for n in range(5)]
    problems = [
        {"task_id": 11 + n, "text": f"Do {n}.", "code": PROGRAM, "test_list": ["assert area(0)"]}
        for n in range(5)
    ]
    for name, rows in (("spec_bench", asked), ("mbpp", problems)):
        lines = "\n".join(map(json.dumps, rows))
        (tmp_path / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    with pytest.raises(SpecjaxError, match="wiki_demo"):
        list(questions_in(tmp_path))
    (tmp_path / "wiki_demo.txt").write_text("\n".join(["One text."] * 5), encoding="utf-8")
    found = [each["category"] for each in questions_in(tmp_path)]
    assert len(set(found)) == 9 and all(found.count(kind) == bench.PER_KIND for kind in found)


def test_the_same_command_goes_on_and_short_fits_beside_it(tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(bench, "run_bench", lambda load, options: measured.append(options))
    monkeypatch.setattr(bench, "questions_in", lambda folder: iter([{"turns": ["Why?"]}]))
    for short in (False, False, True):
        bench.Options("target", tmp_path, tmp_path / "out", short=short).run()
        (tmp_path / "out" / "greedy").mkdir(exist_ok=True)
    assert [each.out.name for each in measured] == ["greedy", "sampled"] * 2 + ["short"]
    assert all(Path(each.tasks).read_text().count("Why?") == 1 for each in measured)
    assert set(measured[-1].methods.split(",")) == set(bench.SHORT)


def test_a_bad_file_of_questions_is_named(tmp_path):
    (tmp_path / "spec_bench.jsonl").write_bytes(b"{")
    with pytest.raises(SpecjaxError, match="is not JSONL"):
        list(questions_in(tmp_path))


def test_what_is_not_trained_is_left_out_and_named(tmp_path, capsys):
    (tmp_path / "draft" / "model").mkdir(parents=True)
    sources = sources_at(tmp_path)
    assert "draft-model" in sources and "hass" in sources and "eagle3" not in sources
    assert "without eagle3" in capsys.readouterr().out


def test_the_settings_of_small_trees_are_read():
    for method, settings in bench.SETTINGS.items():
        METHODS.read_settings(method, [f"{name}={value}" for name, value in settings.items()])
