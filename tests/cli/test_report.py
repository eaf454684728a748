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


def test_a_folder_without_a_report_is_rejected_and_left_alone(results, tmp_path, error_line):
    (results / "report.md").mkdir()
    for folder, message in ((results, "cannot write"), (tmp_path / "none", "holds no benchmark")):
        assert main(["report", str(folder)]) == 2
        assert message in error_line()
    assert not list(results.glob("*.png"))
    (results / "report.md").rmdir()
    (results / ROWS).unlink()
    assert main(["report", str(results)]) == 2
    assert "has no results yet; repeat its command" in error_line()
