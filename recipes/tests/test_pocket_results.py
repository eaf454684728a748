"""Pocket's page: published settings, and figures from the folder of a benchmark."""

import re

from benchmarks.claims.traces import TRACES
from recipes.pocket.results import page_of, published
from specjax import load
from specjax.bench.results import open_results
from tests.bench.test_report import rows_at


def test_settings_that_a_cpu_replaces_are_the_published_ones():
    settings = published({"plus": "pld-plus", "eagle2": "eagle2"}, load("pocket"))
    assert {"plus.num_tokens=70", "eagle2.num_tokens=60", "eagle2.depth=6"} <= set(settings)


def test_the_page_shows_what_the_folder_holds(tmp_path):
    facts = {"dtype": "float32", "machine": "a machine", "products": "native (Avx2)"}
    about = {**facts, "num_prompts": 7, "max_new_tokens": 60, "revision": "0123456789abcdef"}
    results = open_results(tmp_path, about)
    rows = [*rows_at(0.0), *rows_at(1.0)]
    results.write_rows(rows)
    parts = {f"{part}_seconds": 0.0125 for part in ("draft", "verify", "rest")}
    results.folder.write_json(TRACES, {"methods": [{"method": "pld", **parts}]})
    text = page_of(tmp_path)
    assert "a machine" in text and "at revision 0123456789ab," in text
    assert re.search(r"\| pld +\| +12\.500 \|", text)
    for row in rows:
        if row.task == "all" and row.method != "plain":
            figures = re.search(rf"\| `{row.method}` +\|(.*)", text).group(1)
            assert f"{row.mean_accepted_length:.2f}" in figures and f"{row.ratio:.2f}x" in figures
    assert {len(line.split(" | ")) for line in text.splitlines() if line.startswith("| `")} == {5}
