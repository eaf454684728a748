"""`specjax report`: where its pages are, and what it says if there can be none."""

import pytest

from specjax.bench.measure import GeneratedText, Program, Sample
from specjax.bench.results import ROWS, open_results
from specjax.bench.summary import summarise
from specjax.cli import main
from specjax.run.tasks import TaskPrompt


@pytest.fixture
def results(tmp_path):
    """One run of plain decoding."""
    text = GeneratedText((1, 2), 2, (0, 2), (False, False))
    sample = Sample("plain", "float32", (TaskPrompt("code", (5,)),), 0, 0, (text,), 0.1, 0.2, 0)
    results = open_results(tmp_path, {"target": "tiny"})
    results.write_rows(summarise([sample], {"plain": Program()}))
    return tmp_path


def test_pages_are_written_beside_the_results(results, capsys):
    assert main(["report", str(results)]) == 0
    page = results / "report.md"
    assert capsys.readouterr().out == f"written to {page}\n"
    assert "T=0, batch 1" in page.read_text()
    assert main(["report", str(results)]) == 0, "pages are made anew"


def test_what_is_no_finished_benchmark_is_refused(results, tmp_path, error_line):
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "none holds no benchmark; run `specjax bench --out" in error_line()
    rows = (results / ROWS).read_text()
    (results / ROWS).write_text(rows + rows[:40] + "\n")
    assert main(["report", str(results)]) == 2
    assert "rows.jsonl:2 is damaged" in error_line()
    (results / ROWS).unlink()
    assert main(["report", str(results)]) == 2
    assert "has no results yet; repeat its command" in error_line()


def test_an_unwritable_report_leaves_no_charts(results, error_line):
    (results / "report.md").mkdir()
    assert main(["report", str(results)]) == 2
    assert "cannot write" in error_line()
    assert not list(results.glob("*.png"))
