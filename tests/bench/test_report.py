"""The report of made-up rows: all figures are shown, and nothing is taken as markup."""

import re
from dataclasses import replace

import pytest

from specjax.bench.measure import GeneratedText, Program, Sample
from specjax.bench.report import plots
from specjax.bench.report.markdown import PASSED, write_report
from specjax.bench.results import RUN, Condition, open_results
from specjax.bench.summary import summarise
from specjax.core.errors import SpecjaxError
from specjax.core.folder import RunFolder
from specjax.run.tasks import TaskPrompt

ABOUT = {
    "target": "<tiny> & co",
    "dtype": "float32",
    "peers": "",
    "drafters": ["rest=a|b"],
    "versions": {"jax": "0.10"},
    "revision": None,
    "verification": "coupled",
    "command": "specjax bench --target '<tiny>'",
}
PROGRAMS = {
    "plain": Program(1.5, False, 30_000_000),
    "medusa": Program(2.5, True, 40_000_000),
    "peer": Program(),
}


def sample(method: str, kind: str, number: int, repeat: int, seconds: float, lie: bool) -> Sample:
    """Twelve tokens; medusa drafts two a round and has 1, 2 and 3 accepted."""
    rounds, lengths = (12, (0, 12)) if method == "plain" else (6, (0, 2, 2, 2))
    tokens = (7,) * 12 if lie else tuple(range(12))
    is_own = method != "peer"
    text = GeneratedText(tokens, rounds, lengths if is_own else (), (False,) * 12 * is_own)
    batch = (TaskPrompt(kind, (number, 1, 2)),)
    prefill = 0.25 if is_own else None
    return Sample(method, "float32", batch, number, repeat, (text,), prefill, seconds, 0)


def rows_at(temperature: float, lie: bool = False):
    seconds = {"plain": 1.0, "medusa": 0.5, "peer": 2.0}
    samples = [
        sample(method, kind, number, repeat, time, lie and method == "peer" and kind == "two")
        for number, kind in enumerate(("one", "two"))
        for repeat in range(2)
        for method, time in seconds.items()
    ]
    rows = summarise(samples, PROGRAMS, temperature=temperature)
    return [row if row.method == "peer" else replace(row, bandwidth_share=0.37) for row in rows]


@pytest.fixture
def folder(tmp_path):
    """Results without any of the files that need not be there."""
    results = open_results(tmp_path, ABOUT)
    results.write_rows(rows_at(0.0))
    return tmp_path


def markdown_tables(text: str) -> list[list[list[str]]]:
    blocks = re.findall(r"(?:^\|.*\|\n?)+", text, flags=re.MULTILINE)
    rows = [block.strip().splitlines() for block in blocks]
    return [[re.split(r"(?<!\\)\|", row)[1:-1] for row in block] for block in rows]


FIGURES = (  # of the rows above
    *("12.3 GB/s", "rest=a|b", "jax 0.10", "specjax bench --target '<tiny>'", "<tiny> & co"),
    *("9.6", "16.0", "1.67", "0.62", "1.67-1.67", "37%", "2.00", "0.500", "40", "2.5 (cached)"),
    *("Accepted length per task", "Acceptance rate by depth", "0.67", "0.50"),
    *("DIFFERENT TOKENS: peer did not generate", "T=0.7, batch 1"),
)


def test_every_figure_is_in_the_report(folder):
    results = open_results(folder, ABOUT)
    results.add_bandwidth(Condition(0.0, 1), 12.3e9)
    results.write_rows([*rows_at(0.0), *rows_at(0.7, lie=True)])
    report = write_report(folder).read_text()
    for figure in FIGURES:
        assert figure in re.sub(r"\\([<|])", r"\1", report)
    tables = markdown_tables(report)
    assert len(tables) == 9
    assert all(len({len(row) for row in table}) == 1 for table in tables)
    charts = re.findall(r"!\[.*\]\((.*)\)", report)
    assert len(charts) == len(set(charts)) == 2
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in charts)
    assert {path.suffix for path in folder.iterdir()} == {".md", ".png", ".json", ".jsonl"}


def test_problems_come_first_and_what_there_is_not_is_left_out(folder):
    report = write_report(folder).read_text()
    assert PASSED in report
    assert not [words for words in ("T=0.7", "None", "nan") if words in report]
    open_results(folder, ABOUT).write_rows(rows_at(0.0, lie=True))
    report = write_report(folder).read_text()
    assert PASSED not in report
    assert report.index("> - T=0, batch 1: DIFFERENT TOKENS: peer") < report.index("## ")
    assert "| NO |" in report


@pytest.mark.parametrize("about", [{"methods": [1]}, {"methods": 2}, {"bandwidth": "x"}])
def test_a_damaged_description_is_one_error(folder, about):
    RunFolder(folder).write_json(RUN, ABOUT | about)
    with pytest.raises(SpecjaxError, match=r"run\.json is not as `specjax bench` wrote it"):
        write_report(folder)


def test_a_damaged_figure_is_one_error(folder):
    rows = folder / "rows.jsonl"
    rows.write_text(rows.read_text().replace('"tau": ', '"tau": "x", "ignored": '))
    with pytest.raises(SpecjaxError, match=r"rows\.jsonl:1 is damaged"):
        write_report(folder)


def test_lossy_acceptance_is_reported(tmp_path):
    open_results(tmp_path, ABOUT | {"verification": "typical"}).write_rows(
        replace(row, is_compared=row.method == "plain") for row in rows_at(1.0)
    )
    report = write_report(tmp_path).read_text()
    assert "> - T=1, batch 1: LOSSY" in report
    assert [row[-1].strip() for row in markdown_tables(report)[0][2:]] == ["yes", "LOSSY", "LOSSY"]


def test_the_chart_holds_the_figures():
    rows = [row for row in rows_at(0.0) if row.task == "all"]
    bars = plots.speeds(rows).axes[0].patches
    assert [bar.get_width() for bar in bars] == pytest.approx([1, 1.25 / 0.75, 1.25 / 2])
    assert [bool(bar.get_hatch()) for bar in bars] == [False, False, True]
