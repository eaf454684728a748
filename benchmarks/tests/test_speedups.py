"""The chart of the README: its figures, from a finished benchmark, and its bars."""

import json
from dataclasses import replace

from benchmarks.speedups import ABOUT, FIGURES, SpeedupOptions, chart, figures_of, run
from specjax.bench.measure import Program
from specjax.bench.results import Results
from specjax.bench.summary import Measurement
from specjax.methods import METHODS


def test_the_chart_shows_the_figures_of_the_repository():
    found = json.loads(FIGURES.read_text())
    assert found["command"].startswith("specjax bench ")
    assert {row["method"] for row in found["methods"]} <= set(METHODS)
    (axes,) = chart(found).axes
    assert [bar.get_width() for bar in axes.patches] == [row["x_plain"] for row in found["methods"]]
