"""The pictures of the notebooks: pages of sources, and rounds over time."""

from html.parser import HTMLParser

from specjax import notebook
from specjax.run.attribution import Span


class Reader(HTMLParser):
    """Collects the text of a page's two halves, and the classes of its spans."""

    def __init__(self):
        super().__init__()
        self.texts, self.classes, self.inside = [], [], False

    def handle_starttag(self, tag, attrs):
        if tag == "pre":
            self.texts.append("")
            self.classes.append([])
            self.inside = True
        elif tag == "span" and self.inside:
            self.classes[-1].append(dict(attrs).get("data-spans"))

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "pre"

    def handle_data(self, data):
        if self.inside:
            self.texts[-1] += data


def test_the_page_shows_both_sides_and_escapes_them():
    prompt, output = ["a", "<b>", " c", "d"], ["x", "<b>", " c", "&"]
    page = notebook.attribution_page(prompt, output, [Span(1, 3, 1)])
    reader = Reader()
    reader.feed(page)
    assert reader.texts == ["".join(prompt), "".join(output)]
    assert reader.classes == [[None, "s0", "s0", None], [None, "s0", "s0", None]]
    assert "2 of 4 output tokens" in page
