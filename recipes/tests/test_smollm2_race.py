"""The animation of two runs."""

import xml.etree.ElementTree as ElementTree

from recipes.smollm2.race import COLUMNS, Run, drawing, lines_of

TEXT = "if a < b & c: " * 12
RUNS = [
    Run(name, [(step * n / 10, TEXT[n : n + 1]) for n in range(len(TEXT))], 40)
    for name, step in (("plain", 2.0), ("pld", 1.0))
]


def test_each_piece_appears_at_its_time_and_the_slower_run_ends_last():
    for run in RUNS:
        lines = lines_of(run)
        assert len(lines) > 4 and all(sum(len(t) for _, t in line) <= COLUMNS for line in lines)
        pieces = [piece for line in lines for piece in line]
        assert pieces == [*run.pieces, (run.seconds, f"({run.seconds:.1f} s)")]
    picture = ElementTree.fromstring(drawing(RUNS, "a device"))
    texts = ["".join(element.itertext()) for element in picture.findall(".//{*}text")]
    assert "plain: 1 tokens/s" in texts and "pld: 2 tokens/s" in texts
    times = [float(each.get("keyTimes").split(";")[1]) for each in picture.findall(".//{*}animate")]
    slower, faster = times[: len(times) // 2], times[len(times) // 2 :]
    assert slower == sorted(slower) and max(faster) < max(slower) < 1
    assert abs(max(slower) - 2 * max(faster)) < 1e-3  # as written
