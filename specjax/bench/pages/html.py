"""The report of a benchmark as one HTML page that needs no network and no other file."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from specjax.bench.measure import PLAIN
from specjax.bench.oracle import drafted_lengths
from specjax.bench.pages import plots
from specjax.bench.pages.contents import Contents, facts_of, stage_name
from specjax.bench.pages.tables import (
    COLUMNS,
    SPEED,
    curve_table,
    oracle_table,
    rule_table,
    trace_table,
)
from specjax.bench.summary import Measurement
from specjax.core.files import writable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT = "report.html"
TEMPLATE = "report.html.jinja"
MOST_TOKENS = 100_000  # of all coloured texts: more makes a page slow
BAR_WIDTH, BAR_HEIGHT = 120, 14  # in CSS pixels


def write_page(contents: Contents, folder: Path) -> Path:
    """Writes the page, and returns its file.

    Raises:
        SpecjaxError: if it cannot be written.
    """
    path = folder / REPORT
    with writable(path):
        path.write_text(page(contents), encoding="utf-8")
    return path


def page(contents: Contents) -> str:
    """The page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    texts, num_left_out = shown_texts(contents.texts)
    return environment.get_template(TEMPLATE).render(
        contents=contents,
        plain=PLAIN,
        columns=COLUMNS,
        after_speed=1 + [column.title for column in COLUMNS].index(SPEED),
        bars=speed_bars,
        pictures=_Pictures(),
        tables={
            "trace": trace_table,
            "oracle": oracle_table,
            "rules": rule_table,
            "curve": curve_table,
        },
        facts_of=facts_of,
        texts=texts,
        num_left_out=num_left_out,
    )


# ---- Bars beside figures -----------------------------------------------------------------------


def speed_bars(rows: Sequence[Measurement]) -> list[Markup]:
    """A bar per row as long as its speed over plain's, with its quartiles and a line at plain's.

    Bars that do not reach that line are hatched.
    """
    longest = max(1.0, *(max(row.ratio, row.ratio_quartiles[1]) for row in rows))
    return [_bar(row, (BAR_WIDTH - 2) / longest) for row in rows]


def _bar(row: Measurement, unit: float) -> Markup:
    low, high = (1 + unit * quartile for quartile in row.ratio_quartiles)
    middle, kind = BAR_HEIGHT / 2, "faster" if row.ratio >= 1 else "slower"
    label = f"{row.method}: {row.ratio:.2f} times plain decoding's speed"
    return Markup(
        '<svg class="bar" role="img" aria-label="{}" viewBox="0 0 {} {}">'
        '<rect class="{}" x="1" y="3" width="{:.1f}" height="8"/>'
        '<path class="quartiles" d="M{:.1f} {}H{:.1f}M{:.1f} 4v6M{:.1f} 4v6"/>'
        '<path class="plain" d="M{:.1f} 0v{}"/></svg>'
    ).format(
        label,
        BAR_WIDTH,
        BAR_HEIGHT,
        kind,
        unit * row.ratio,
        low,
        middle,
        high,
        low,
        high,
        1 + unit,
        BAR_HEIGHT,
    )


# ---- Pictures ----------------------------------------------------------------------------------


class _Pictures:
    """SVG for the page; each picture gets a name of its own."""

    def __init__(self):
        self._count = 0

    def histograms(self, row: Measurement, beside: Sequence[Measurement]) -> Markup:
        shares = f"share of rounds by tokens, mean {row.mean_accepted_length:.2f}"
        return self._svg(plots.histograms([row], beside), f"{row.method}: {shares}")

    def rates(self, row: Measurement) -> Markup:
        told = ", ".join(f"{rate:.2f}" for rate in row.rates)
        return self._svg(plots.rates([row]), f"{row.method}: accepted by depth: {told}")

    def rounds_over_time(self, methods: Sequence[Mapping[str, Any]]) -> Markup:
        label = "rounds over time; the table below has the figures"
        return self._svg(plots.rounds_over_time(methods), label)

    def oracle_lengths(self, each: Any) -> Markup:
        label = f"{each.task}: share of rounds by tokens drafted by the oracle"
        return self._svg(plots.oracle_lengths([each]), label)

    def oracle_course(self, each: Any) -> Markup:
        label = f"{each.task}: tokens drafted by the oracle in the course of a run"
        return self._svg(plots.oracle_course([each]), label)

    def curve(self, curve: Any) -> Markup:
        label = f"{curve.title}; the table below has the figures"
        return self._svg(plots.curve(curve), label)

    def _svg(self, figure: "Figure", label: str) -> Markup:
        self._count += 1
        return Markup(plots.inline_svg(figure, label, f"p{self._count}"))


# ---- Texts -------------------------------------------------------------------------------------


class ShownText(NamedTuple):
    """One method's text."""

    method: str
    summary: str
    text: Markup


class ShownPrompt(NamedTuple):
    """One prompt, and what all methods said to it."""

    title: str
    prompt: str
    texts: list[ShownText]


def shown_texts(lines: Sequence[Mapping[str, Any]]) -> tuple[list[ShownPrompt], int]:
    """The texts by temperature, size of batch and kind, and how many the page has no room for."""
    found: dict[tuple[str, str], ShownPrompt] = {}
    num_tokens = num_left_out = 0
    for line in lines:
        num_tokens += len(line["pieces"])
        if num_tokens > MOST_TOKENS:
            num_left_out += 1
            continue
        title = f"{line['kind']}, {stage_name(line['temperature'], line.get('num_rows', 1))}"
        shown = found.setdefault((title, line["prompt"]), ShownPrompt(title, line["prompt"], []))
        text = Markup("").join(coloured(line["pieces"], line["from_draft"]))
        shown.texts.append(ShownText(line["method"], _summary(line["from_draft"]), text))
    return list(found.values()), num_left_out


def coloured(pieces: Sequence[str], from_draft: Sequence[bool]) -> Iterator[Markup]:
    """An element per token: `i` for drafted ones; `b` for the target's own, which end rounds."""
    for piece, is_drafted in zip(pieces, from_draft, strict=True):
        text = escape(piece).replace("\n", Markup("<span></span>\n"))  # shown as an arrow
        end = "\n" if text.endswith("\n") else ""  # outside, so that the element ends its line
        template = "<i>{}</i>{}" if is_drafted else "<b>{}</b>{}"
        yield Markup(template).format(text.removesuffix("\n"), end)


def _summary(from_draft: Sequence[bool]) -> str:
    rounds = len(drafted_lengths(from_draft))
    return f"{len(from_draft)} tokens in {rounds} rounds, {sum(from_draft)} of them drafted"
