"""The report of a benchmark as one HTML page that needs no network and no other file."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from specjax.bench.measure import PLAIN
from specjax.bench.report.contents import PASSED, Picture, ReportContents
from specjax.bench.report.plots import inline_svg
from specjax.bench.results import Stage
from specjax.core.files import writable

REPORT = "report.html"
TEMPLATE = "report.html.jinja"
MAX_TOKENS = 100_000  # of all coloured texts: more makes a page slow


def write_page(contents: ReportContents, folder: Path) -> Path:
    """Writes the page, and returns its file.

    Raises:
        SpecjaxError: if it cannot be written.
    """
    path = folder / REPORT
    with writable(path):
        path.write_text(page(contents), encoding="utf-8")
    return path


def page(contents: ReportContents) -> str:
    """Renders the page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    numbers = count(1)

    def svg(picture: Picture) -> Markup:
        return Markup(inline_svg(picture.draw(), picture.caption, f"p{next(numbers)}"))

    texts, num_left_out = shown_texts(contents.texts)
    return environment.get_template(TEMPLATE).render(
        contents=contents,
        passed=PASSED,
        plain=PLAIN,
        svg=svg,
        texts=texts,
        num_left_out=num_left_out,
    )


class ShownText(NamedTuple):
    """One method's text."""

    method: str
    summary: str
    text: Markup


class ShownPrompt(NamedTuple):
    """One prompt, and every method's continuation."""

    title: str
    prompt: str
    texts: list[ShownText]


def shown_texts(lines: Sequence[Mapping[str, Any]]) -> tuple[list[ShownPrompt], int]:
    """Returns the texts by prompt, and how many the page has no room for."""
    found: dict[tuple[str, str], ShownPrompt] = {}
    num_tokens = num_left_out = 0
    for line in lines:
        num_tokens += len(line["pieces"])
        if num_tokens > MAX_TOKENS:
            num_left_out += 1
            continue
        title = f"{line['kind']}, {Stage(line['temperature'], line['num_rows'])}"
        shown = found.setdefault((title, line["prompt"]), ShownPrompt(title, line["prompt"], []))
        text = Markup("").join(coloured(line["pieces"], line["from_draft"]))
        shown.texts.append(ShownText(line["method"], _summary(line["from_draft"]), text))
    return list(found.values()), num_left_out


def coloured(pieces: Sequence[str], from_draft: Sequence[bool]) -> Iterator[Markup]:
    """Yields an element per token: `i` if drafted, `b` if the target's own, which ends a round."""
    for piece, is_drafted in zip(pieces, from_draft, strict=True):
        text = escape(piece).replace("\n", Markup("<span></span>\n"))  # shown as an arrow
        end = "\n" if text.endswith("\n") else ""  # outside, so that the element ends its line
        template = "<i>{}</i>{}" if is_drafted else "<b>{}</b>{}"
        yield Markup(template).format(text.removesuffix("\n"), end)


def _summary(from_draft: Sequence[bool]) -> str:
    # The last round may have been cut before the target's own token.
    rounds = from_draft.count(False) + (len(from_draft) > 0 and from_draft[-1])
    return f"{len(from_draft)} tokens in {rounds} rounds, {sum(from_draft)} of them drafted"
