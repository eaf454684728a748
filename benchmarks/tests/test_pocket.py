"""Pocket's page: published settings, and figures from the folder of a benchmark."""

from dataclasses import replace

import pytest

from benchmarks import pocket
from benchmarks.pocket import TRACES, PocketOptions, measure, page_of, published
from specjax import SpecjaxError, load
from specjax.bench.results import open_results
from specjax.bench.run import check
from specjax.bench.summary import Measurement
from tests.bench.test_report import rows_at

FACTS = {"dtype": "float32", "machine": "a machine", "products": "native (Avx2)"}
ABOUT = {**FACTS, "num_prompts": 7, "max_new_tokens": 60, "revision": "0123456789abcdef"}


def test_settings_that_a_cpu_replaces_are_the_published_ones():
    names = {"plus": "pld-plus", "eagle2": "eagle2", "both": "hybrid"}
    settings = published(names, load("pocket"))
    assert {"plus.num_tokens=70", "eagle2.num_tokens=60", "both.head.depth=6"} <= set(settings)


def test_what_is_measured_exists_and_only_what_is_missing(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(pocket, "run_bench", lambda load, options: check(options))
    monkeypatch.setattr(pocket, "measure_parts", lambda *given: asked.append(given[-1].methods))
    measure(tmp_path, load("pocket"), PocketOptions(tmp_path))
    assert "hass,eagle3" in asked[0]
    open_results(tmp_path, ABOUT).folder.write_json(TRACES, {"methods": [{"method": "pld"}]})
    measure(tmp_path, load("pocket"), PocketOptions(tmp_path))
    assert len(asked) == 1


def fill(folder, rows: list[Measurement]) -> None:
    results = open_results(folder, ABOUT)
    results.write_rows(rows)
    parts = {f"{part}_seconds": 0.0125 for part in ("draft", "verify", "rest")}
    results.folder.write_json(TRACES, {"methods": [{"method": "pld", **parts}]})


def test_the_page_shows_what_the_folder_holds(tmp_path):
    warm = [replace(row, ratio=1.25, mean_accepted_length=1.5) for row in rows_at(1.0)]
    fill(tmp_path, [*rows_at(0.0), *warm])
    text = page_of(tmp_path)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    for row in rows_at(0.0):
        if row.task == "all" and row.method != "plain":
            accepted, speed = f"{row.mean_accepted_length:.2f}", f"{row.ratio:.2f}x"
            assert [f"`{row.method}`", accepted, "1.50", speed, "1.25x"] in cells
    assert ["pld", "12.500", "12.500", "12.500"] in cells
    assert "a machine" in text and "at revision 0123456789abcdef:" in text


def test_wrong_figures_make_no_page(tmp_path):
    fill(tmp_path, [*rows_at(0.0), *rows_at(1.0, lie=True)])
    with pytest.raises(SpecjaxError, match="DIFFERENT TOKENS"):
        page_of(tmp_path)
