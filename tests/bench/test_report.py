"""The pages of a report, from made-up rows: what is known is shown, and nothing is taken as markup.

How they look is for eyes in a browser; here they are read as text.
"""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from specjax.bench.curves import CURVES, Curve, Point, keep_curve, read_curves
from specjax.bench.measure import GeneratedText, Program, Sample
from specjax.bench.report import html as pages
from specjax.bench.report import plots
from specjax.bench.report.contents import PASSED, read_contents
from specjax.bench.report.html import page, shown_texts, write_page
from specjax.bench.report.markdown import write_markdown
from specjax.bench.report.plots import SCHEME, inline_svg
from specjax.bench.results import Stage, open_results
from specjax.bench.summary import summarise
from specjax.core.errors import SpecjaxError
from specjax.run.tasks import Request

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
PIECES = ["def f", "(x):\n", "    ", "<b>&", "\n"]
FROM_DRAFT = [True, False, True, True, False]
VOID = {"meta", "rect", "path", "use", "br"}


def sample(method: str, kind: str, number: int, repeat: int, seconds: float, lie: bool) -> Sample:
    """Twelve tokens; medusa drafts two a round and has 1, 2 and 3 accepted."""
    rounds, lengths = (12, (0, 12)) if method == "plain" else (6, (0, 2, 2, 2))
    tokens = (7,) * 12 if lie else tuple(range(12))
    is_own = method != "peer"
    text = GeneratedText(tokens, rounds, lengths if is_own else (), (False,) * 12 * is_own)
    batch = (Request(kind, (number, 1, 2)),)
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


def text_line(method: str, temperature: float) -> dict:
    return {
        "temperature": temperature,
        "num_rows": 1,
        "method": method,
        "kind": "one",
        "prompt": "<script>prompt</script>",
        "pieces": PIECES,
        "from_draft": FROM_DRAFT,
    }


@pytest.fixture
def folder(tmp_path):
    """Results without any of the files that need not be there."""
    results = open_results(tmp_path, ABOUT)
    results.write_rows(rows_at(0.0))
    return tmp_path


def fill(folder) -> None:
    """Adds all of them, and a second temperature."""
    results = open_results(folder, ABOUT)
    results.add_bandwidth(Stage(0.0, 1), 12.3e9)
    rows = [*rows_at(0.0), *rows_at(0.7, lie=True)]
    results.write_rows(rows)
    results.write_texts([text_line("plain", 0.0), text_line("medusa", 0.0)])
    figures = {f"{part}_seconds": 0.002 for part in ("draft", "verify", "rest", "one_program")}
    figures |= {"round_seconds": 0.006, "accepted_length": 2.25, "num_rounds": 3}
    methods = [{"method": name, "excerpt": [1, 3, 2], **figures} for name in ("plain", "medusa")]
    results.write_traces({"temperature": 0.0, "device": "cpu", "methods": methods})
    points = [Point(5, 2.5, 101.0), Point(10, 3.25, 99.0)]
    keep_curve(folder, Curve("PLD+ over K", "num_tokens", {"PLD+": points}))


class Page(HTMLParser):
    """The elements and texts of a page; a tag out of place is an error."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag, f"</{tag}> closes another element: {self.getpos()}"

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.elements if name == tag]


def markdown_tables(text: str) -> list[list[list[str]]]:
    blocks = re.findall(r"(?:^\|.*\|\n?)+", text, flags=re.MULTILINE)
    rows = [block.strip().splitlines() for block in blocks]
    return [[re.split(r"(?<!\\)\|", row)[1:-1] for row in block] for block in rows]


FIGURES = (  # of the rows above
    *("12.3 GB/s", "rest=a|b", "jax 0.10", "specjax bench --target '<tiny>'", "<tiny> & co"),
    *("9.6", "16.0", "1.67", "0.62", "1.67-1.67", "37%", "2.00", "0.500", "40", "2.5 (cached)"),
    *("Tau, as papers form it, per task", "9.6 ± 0.0", "1.67 ± 0.00"),
    *("Accepted length per task", "Acceptance rate by depth", "0.67", "0.50"),
)
MORE_FIGURES = (  # of the files that need not be there
    *("DIFFERENT TOKENS: peer did not generate", "T=0.7, batch 1", "6.000", "2.25"),
    *("PLD+ over K", "3.25", "101", "num_tokens"),
)


def test_every_figure_is_on_the_page_and_in_the_tables(folder):
    fill(folder)
    contents = read_contents(folder)
    shown = Page(write_page(contents, folder).read_text())
    markdown = write_markdown(contents, folder).read_text()
    for figure in (*FIGURES, *MORE_FIGURES):
        assert figure in shown.text
        assert figure in re.sub(r"\\([<|])", r"\1", markdown)
    tables = markdown_tables(markdown)
    assert len(tables) == len(shown.all("table")) == 17
    assert all(len({len(row) for row in table}) == 1 for table in tables)
    pictures = re.findall(r"!\[.*\]\((.*)\)", markdown)
    assert len(pictures) == len(set(pictures)) == 8
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    assert {path.suffix for path in folder.iterdir()} == {".html", ".md", ".png", ".json", ".jsonl"}


def test_a_page_needs_nothing_else_and_can_be_read_aloud(folder):
    fill(folder)
    text = page(read_contents(folder))
    shown = Page(text)
    assert not re.search(r"\b(?:src|href)=\"(?!#)", text)
    assert "@import" not in text and "url(http" not in text and not shown.all("script")
    assert all(each.get("aria-label") for each in shown.all("svg") if "aria-hidden" not in each)
    assert all(each["scope"] in ("row", "col") for each in shown.all("th"))
    assert len(shown.all("caption")) == len(shown.all("table"))
    names = [each["id"] for _, each in shown.elements if "id" in each]
    assert len(names) == len(set(names))
    links = {each["href"] for each in shown.all("a")} | set(re.findall(r"url\((#[\w-]+)\)", text))
    assert {link.removeprefix("#") for link in links} <= set(names)


def test_complaints_come_first_and_only_where_there_are_some(folder):
    assert PASSED in Page(page(read_contents(folder))).text
    open_results(folder, ABOUT).write_rows(rows_at(0.0, lie=True))
    contents = read_contents(folder)
    text = page(contents)
    assert PASSED not in Page(text).text
    assert text.index("DIFFERENT TOKENS: peer") < text.index("What was measured</h2>")
    assert '<td class="bad">NO</td>' in text
    markdown = write_markdown(contents, folder).read_text()
    assert markdown.index("> - T=0, batch 1: DIFFERENT TOKENS") < markdown.index("## ")


def test_lossy_acceptance_is_complained_of(tmp_path):
    open_results(tmp_path, ABOUT | {"verification": "typical"}).write_rows(
        replace(row, is_compared=row.method == "plain") for row in rows_at(1.0)
    )
    contents = read_contents(tmp_path)
    assert [line.split(":")[1] for line in contents.alarms] == [" LOSSY"]
    assert [row[-1] for row in contents.sections[0].blocks[0].rows] == ["yes", "LOSSY", "LOSSY"]


def test_what_is_not_there_is_left_out(folder):
    shown = Page(page(read_contents(folder)))
    assert shown.all("nav")
    for title in ("Rounds over time", "Drafted tokens", "over K"):
        assert title not in shown.text
    markdown = write_markdown(read_contents(folder), folder).read_text()
    assert "Rounds over time" not in markdown
    assert "None" not in shown.text and "nan" not in shown.text


def test_each_token_tells_how_it_came_and_is_no_markup(folder):
    open_results(folder, ABOUT).write_texts([text_line("medusa", 0.0)])
    text = page(read_contents(folder))
    assert "<script>" not in text
    newline = "<span></span>"
    wanted = f"<i>def f</i><b>(x):{newline}</b>\n<i>    </i><i>&lt;b&gt;&amp;</i><b>{newline}</b>\n"
    assert wanted in text
    assert "medusa: 5 tokens in 2 rounds, 3 of them drafted" in text
    assert "one, T=0, batch 1" in text


def test_a_page_has_room_for_so_many_tokens(monkeypatch):
    monkeypatch.setattr(pages, "MAX_TOKENS", 2 * len(PIECES))
    lines = [text_line(method, 0.0) for method in ("plain", "pld", "medusa")]
    shown, num_left_out = shown_texts([*lines, text_line("plain", 1.0)])
    assert [[text.method for text in prompt.texts] for prompt in shown] == [["plain", "pld"]]
    assert num_left_out == 2


def test_pictures_hold_the_figures_in_the_colours_of_the_page():
    rows = [row for row in rows_at(0.0) if row.task == "all"]
    medusa = next(row for row in rows if row.method == "medusa")
    bars = plots.speeds(rows).axes[0].patches
    assert [bar.get_width() for bar in bars] == pytest.approx([1, 1.25 / 0.75, 1.25 / 2])
    assert [bool(bar.get_hatch()) for bar in bars] == [False, False, True]
    axes = plots.histograms([medusa]).axes[0]
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([1 / 3] * 3)
    [line] = plots.rates([medusa]).axes[0].lines
    assert list(line.get_ydata()) == pytest.approx([2 / 3, 1 / 2])
    svg = inline_svg(plots.rates([medusa]), 'a "label" <', "p1")
    assert 'aria-label="a &quot;label&quot; &lt;"' in svg
    assert not any(grey in svg for grey in SCHEME)
    assert set(re.findall(r"#[0-9a-f]{6}\b", svg)) == set()
    other = inline_svg(plots.rates([medusa]), "the same", "p2")
    assert not set(re.findall(r' id="(.*?)"', svg)) & set(re.findall(r' id="(.*?)"', other))


def test_a_curve_of_the_same_title_is_replaced(tmp_path):
    keep_curve(tmp_path, Curve("a", "k", {"x": [Point(1, 2.0, 3.0)]}))
    keep_curve(tmp_path, Curve("b", "k", {"x": [Point("all", 2.0, 3.0)]}))
    keep_curve(tmp_path, Curve("a", "layer", {"y": [Point(4, 5.0, 6.0)]}))
    assert read_curves(tmp_path) == [
        Curve("b", "k", {"x": [Point("all", 2.0, 3.0)]}),
        Curve("a", "layer", {"y": [Point(4, 5.0, 6.0)]}),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            CURVES,
            '{"title": "a", "setting": "b", "series": {}}\n{"tit',
            "curves.jsonl:2 is damaged",
        ),
        (CURVES, '["a"]', "curves.jsonl:1 is damaged"),
        (CURVES, '{"title": "a", "setting": "b", "series": {"x": [[1]]}}', "curves.jsonl:1"),
    ],
)
def test_a_damaged_file_is_named(folder, name, content, message):
    (folder / name).write_text(content)
    with pytest.raises(SpecjaxError, match=message):
        read_contents(folder)
