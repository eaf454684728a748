"""The pictures of the notebooks: pages of sources, and rounds over time."""

import re
from html import unescape

import numpy as np

from specjax import notebook
from specjax.run.attribution import Span


def test_the_page_shows_both_sides_and_escapes_them():
    prompt, output = ["a", "<b>", " c", "d"], ["x", "<b>", " c", "&"]
    page = notebook.attribution_page(prompt, output, [Span(1, 3, 1)])
    sides = re.findall(r"<pre\b[^>]*>(.*?)</pre>", page, re.DOTALL)
    texts = [unescape(re.sub("<[^>]*>", "", side)) for side in sides]
    assert texts == ["".join(prompt), "".join(output)]
    spans = [re.findall(r'<span(?:[^>]* data-spans="(.*?)")?', side) for side in sides]
    assert spans == [["", "s0", "s0", ""]] * 2
    assert "2 of 4 output tokens" in page


def by_hand(draft: float, lengths: list[int]) -> list[notebook.Round]:
    """Rounds that verify in 4 ms and need 1 ms for the rest; the first was interrupted."""
    return [
        notebook.Round(9.0, 9.0, 9.0, 1),
        *(notebook.Round(draft, 4e-3, 1e-3, length) for length in lengths),
    ]


PLAIN = by_hand(0.0, [1, 1, 1, 1])
FAST = by_hand(3e-3, [1, 1, 4, 3, 4, 4])


def test_rounds_are_drawn_to_scale_above_plain_steps():
    axes = notebook.rounds_over_time({"plain": PLAIN, "fast": FAST, "again": FAST}, 3).axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["fast", "plain, 8 tokens", "again", "plain, 8 tokens"]
    assert [text.get_text() for text in axes.texts] == ["+1", "+4", "+3"] * 2
    drawn = {}
    for bars in axes.collections:
        corners = np.stack([np.asarray(path.vertices)[:4] for path in bars.get_paths()])
        row = round((corners[..., 1].min() + corners[..., 1].max()) / 2)
        starts, ends = corners[..., 0].min(axis=1), corners[..., 0].max(axis=1)
        drawn[row, bars.get_label()] = np.stack([starts, ends], axis=1)
    assert len(drawn) == len(axes.collections) == 2 * (len(notebook.PARTS) + 1)
    rounds, steps = 8.0 * np.arange(3)[:, None], 5.0 * np.arange(8)[:, None]
    for row in (0, 2):
        np.testing.assert_allclose(drawn[row, "draft"], np.add(rounds, (0, 3)))
        np.testing.assert_allclose(drawn[row, "verify"], np.add(rounds, (3, 7)))
        np.testing.assert_allclose(drawn[row, "rest"], np.add(rounds, (7, 8)))
        np.testing.assert_allclose(drawn[row + 1, "plain"], np.add(steps, (0, 5)))
