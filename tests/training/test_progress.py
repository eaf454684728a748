"""The display of a run: a bar on a terminal, measurements everywhere, and the speed."""

import io

import numpy as np
import pytest
from rich.console import Console

from specjax.training import progress
from specjax.training.progress import Progress

BATCH = {"segments": np.asarray([[1, 1, 2, 0], [1, 0, 0, 0]])}  # 4 tokens and padding


def screen(monkeypatch, is_terminal: bool) -> io.StringIO:
    """Captures stderr, as a terminal or not."""
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=60)
    monkeypatch.setattr(progress, "Console", lambda stderr, quiet: console)
    return console.file


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_is_for_terminals_and_a_measurement_for_all(monkeypatch, is_terminal):
    written = screen(monkeypatch, is_terminal)
    with Progress("training eagle", 0, 10) as shown:
        shown.count(BATCH)
        shown.show(5, {"loss": 0.25, "acceptance_rates": [0.25] * 20})  # wider than the terminal
        values = {"accepted_length": 2.5, "rates": [0.5, 0.25]}
        assert shown.measure(5, lambda params: values, {}) == values
    text = written.getvalue()
    assert "step 5: accepted length 2.5  rates 0.5/0.25" in text
    assert ("training eagle" in text) == is_terminal
    assert (" 5/10" in text) == is_terminal
    assert ("loss 0.25" in text) == is_terminal
    assert is_terminal or text.count("\n") == 1


def test_speed_counts_tokens_without_padding_and_no_measurement(monkeypatch):
    screen(monkeypatch, False)
    clock = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    with Progress("training", 0, 10) as shown:
        shown.count(BATCH)
        shown.count(BATCH)
        clock[0] += 2.0

        def measure(params):
            clock[0] += 50.0
            return {"score": 1.0}

        shown.measure(1, measure, {})
        clock[0] += 2.0
        assert shown.show(2, {"loss": 1.0}) == {"tokens_per_second": 2.0}
        shown.count(BATCH)
        clock[0] += 1.0
        assert shown.show(3, {"loss": 1.0}) == {"tokens_per_second": 4.0}  # of this line alone
