"""SmolLM2's questions, their measurement, and the pages written from the figures."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipes.smollm2 import claims, page, results
from recipes.smollm2.checks import Finding, Spread, Verdict
from recipes.smollm2.page import FIGURES, QUOTED, ROOT, TASKS, WIDTHS, Figures, write_pages
from recipes.smollm2.questions import (
    MT_BENCH,
    NUM_EDITED_WORDS,
    PER_KIND,
    correction,
    questions_in,
    renaming,
)
from recipes.smollm2.results import (
    PARTS,
    SETTINGS,
    SIZED,
    curves_at,
    figures_of,
    json_of,
    settings_of,
    sources_at,
)
from specjax.bench.results import Results
from specjax.core.errors import SpecjaxError
from specjax.core.files import read_json
from specjax.core.folder import RunFolder
from specjax.loading.methods import METHODS
from tests.bench.test_report import rows_at

PROGRAM = "def area(r):\r\n    return 3 * r * r"


def test_a_task_to_rename_names_the_one_function_and_shows_the_program():
    task = renaming(PROGRAM)
    assert "function `area` to `solve`" in task and "def area(r):\n    return" in task
    assert renaming(PROGRAM + "\ndef other(): pass") is None


def test_a_text_to_correct_differs_from_the_right_one_in_a_tenth_of_its_words():
    words = [f"word{number}" for number in range(200)]
    garbled = correction(" ".join(words)).split("\n\n")[1].split()
    wrong = [place for place, word in enumerate(garbled) if word != words[place]]
    assert len(garbled) == NUM_EDITED_WORDS and wrong == [4, 14, 24, 34, 44, 54]


def test_every_kind_has_its_questions_and_a_missing_or_bad_file_is_named(tmp_path):
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
    kinds = [question["category"] for question in questions_in(tmp_path)]
    assert set(kinds) | {"all"} == set(TASKS)
    assert all(kinds.count(kind) == PER_KIND for kind in kinds)
    (tmp_path / "spec_bench.jsonl").write_bytes(b"{")
    with pytest.raises(SpecjaxError, match="is not JSONL"):
        list(questions_in(tmp_path))


def test_drafters_that_are_not_trained_are_left_out_and_named(tmp_path, capsys):
    (tmp_path / "draft" / "model").mkdir(parents=True)
    sources = sources_at(tmp_path)
    assert "draft-model" in sources and "hass" in sources and "rest" not in sources
    assert "without rest" in capsys.readouterr().err


def test_all_settings_belong_to_their_methods():
    for name in {*SETTINGS, *SIZED}:
        method = "hybrid" if "+" in name else name
        settings = settings_of(name, 8)
        assert settings.items() >= SETTINGS.get(name, {}).items()
        METHODS.read_settings(method, [f"{key}={value}" for key, value in settings.items()])


def measured(out: Path, monkeypatch, revision: str = "abc") -> dict:
    """The figures of a command whose benchmarks write made-up rows."""

    def bench(load, options):
        about = dict.fromkeys(("dtype", "peers", "products"), "x") | {
            "revision": "abc",
            "max_new_tokens": 64,
        }
        folder = RunFolder(options.out, "run.json")
        folder.path.mkdir(exist_ok=True)
        folder.write_json("run.json", about | {"num_prompts": 2})
        folder.append("bandwidth.jsonl", {"bytes_per_second": 3e10})
        Results(folder).write_rows(rows_at(0.0))

    monkeypatch.setattr(results, "run_bench", bench)
    monkeypatch.setattr(results, "load", lambda *_, **options: SimpleNamespace(config=None))
    monkeypatch.setattr(results, "cheap_rows", lambda config: 4)
    seconds = iter(3 * [dict.fromkeys(WIDTHS, 0.01)])  # of each kind of weights, once
    monkeypatch.setattr(results, "pass_seconds", lambda *_, **options: next(seconds))
    monkeypatch.setattr(results, "use_compilation_cache", lambda: None)
    monkeypatch.setattr(results, "revision", lambda: revision)
    monkeypatch.setattr(results, "questions_in", lambda folder: iter([{"turns": ["Why?"]}]))
    return results.Options("model.gguf", out.parent, out, runs=out).measured()


def test_curves_have_the_measured_steps_of_a_run_or_the_kept_one_of_a_head(tmp_path):
    (tmp_path / "hass").mkdir()
    records = {"step": 10, "loss": 2.0}, {"step": 20, "accepted_length": 1.234}
    RunFolder(tmp_path / "hass").write_records("metrics.jsonl", records)
    curves = curves_at(tmp_path)
    assert curves["hass"] == {"20": 1.23} and len(curves["eagle-longer"]) == 1
    assert "eagle-short" not in curves


def test_a_command_measures_all_parts_and_keeps_to_one_revision(tmp_path, monkeypatch):
    figures = measured(tmp_path / "out", monkeypatch)
    assert measured(tmp_path / "out", monkeypatch) == figures == json.loads(json_of(figures))
    assert {row["part"] for row in figures["rows"]} == set(PARTS)
    medusa = Figures(**figures).row("medusa", "one")
    assert (medusa["speed"], medusa["accepted"], medusa["different"]) == (1.667, 2.0, 0)
    with pytest.raises(SpecjaxError, match="revision was 'abc', now 'other'"):
        measured(tmp_path / "out", monkeypatch, "other")
    RunFolder(tmp_path / "out" / "int8").write_json("run.json", {"revision": "other"})
    with pytest.raises(SpecjaxError, match="int8 has another revision"):
        figures_of(RunFolder(tmp_path / "out", "results.json"), tmp_path)


def test_all_pages_quote_the_figures_of_the_repository(tmp_path):
    for name in (*QUOTED, "docs/results/smollm2.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    figures = Figures(**read_json(FIGURES))
    changed = [{**row, "speed": row["speed"] + 1} for row in figures.rows]
    for shown, is_same in ((Figures(figures.about, changed), False), (figures, True)):
        *written, drawing = write_pages(shown, tmp_path)
        same = [
            path.read_text() == (ROOT / path.relative_to(tmp_path)).read_text() for path in written
        ]
        assert all(same) == is_same and len(same) == len(QUOTED) + 1
    best = figures.ranked()[0]
    for path in (drawing, ROOT / drawing.relative_to(tmp_path)):
        assert f"{figures.row(best)['speed']:.2f}x" in path.read_text()


def test_the_page_of_claims_lists_those_decided():
    table = claims.table_of(read_json(claims.RESULTS))
    assert page.quoted(claims.PAGE, table) == claims.PAGE.read_text()


def test_a_claim_is_decided_by_the_benchmarks_of_its_table(tmp_path, monkeypatch):
    def check(*runs, bar):
        return Finding(Spread(1.2, 1.1, 1.3), f"{runs}, {bar}", Verdict.HOLDS)

    def runs_of(samples, method, on, temperature):
        assert samples == {"T": ["first", "second"]} and temperature == 0
        return f"{method} on {on[0]}"

    for name, target in (("first", "T"), ("second", "T"), ("third", "pocket")):
        (tmp_path / "bench" / name).mkdir(parents=True)
        about = {"revision": "abc", "command": "specjax reproduce hass-table-1 --runs 1"}
        about["target"] = target
        (tmp_path / "bench" / name / "run.json").write_text(json.dumps(about))
    table = {"claims": [["more", "accepted", ["HASS", "theta 0.5"], "1.12", {"bar": 0.9}]]}
    monkeypatch.setattr(claims, "TABLES", {"hass-table-1": table})
    monkeypatch.setattr(claims, "CHECKS", {"accepted": check})
    monkeypatch.setattr(claims, "runs_of", runs_of)
    monkeypatch.setattr(claims, "read_samples", lambda folder: {"T": [folder.name]})
    [row] = claims.decided(tmp_path, "T")["claims"]
    ours = "('HASS on MT-bench', 'theta 0·5 on MT-bench'), 0.9"
    assert (row["ours"], row["verdict"]) == (ours, "holds")
    (tmp_path / "bench" / "second" / "run.json").write_text('{"revision": "other", "target": "T"}')
    with pytest.raises(SpecjaxError, match=r"holds revisions \['abc', 'other'\]"):
        claims.decided(tmp_path, "T")


def test_a_page_without_marks_is_named(tmp_path):
    (tmp_path / "README.md").write_text("# Nothing")
    with pytest.raises(SpecjaxError, match="has no `<!-- figures -->`"):
        page.quoted(tmp_path / "README.md", "text")


def test_all_results_are_of_one_revision():
    pages = [path for path in FIGURES.parent.glob("*.md") if path.name != "index.md"]
    named = {
        page.name: set(re.findall(r"revision ([0-9a-f]{7})", page.read_text())) for page in pages
    }
    assert len(named) > 3 and len(set.union(*named.values())) == 1, named
    assert all(named.values()), named
