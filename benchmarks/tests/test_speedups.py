"""The chart of the README: its figures, from a finished benchmark, and its bars."""

import json

from benchmarks.speedups import ABOUT, FIGURES, SpeedupOptions, chart, run
from specjax.bench.results import Results
from specjax.core.folder import RunFolder
from specjax.loading.methods import METHODS
from tests.bench.test_report import rows_at


def test_the_chart_shows_the_figures_of_the_repository():
    found = json.loads(FIGURES.read_text())
    assert found["command"].startswith("python -m recipes.smollm2.bench ")
    assert {row["method"] for row in found["methods"]} <= set(METHODS)
    (axes,) = chart(found).axes
    assert [bar.get_width() for bar in axes.patches] == [row["x_plain"] for row in found["methods"]]
    assert FIGURES.with_suffix(".svg").is_file()


def test_figures_are_those_of_a_benchmark_over_all_tasks(tmp_path):
    about = dict.fromkeys(ABOUT, "something") | {"target": "a model", "peers": "peer"}
    (tmp_path / "run.json").write_text(json.dumps(about))
    results = Results(RunFolder(tmp_path, "run.json"))
    results.write_rows([*rows_at(0.0), *rows_at(1.0)])
    path = tmp_path / "speedups.json"
    run(SpeedupOptions(str(tmp_path), str(path)))
    found = json.loads(path.read_text())
    (row,) = found["methods"]  # neither plain decoding nor a peer
    assert (found["target"], found["temperature"]) == ("a model", 0.0)
    assert row == {
        "method": "medusa",
        "accepted_length": 2.0,
        "x_plain": 1.67,
        "quartiles": [1.67, 1.67],
    }
    assert "1.67x" in path.with_suffix(".svg").read_text()
