"""What drafting costs: the questions are answered, and wrong options are refused."""

import pytest

from specjax.bench.drafting import DRAFTED, Options, _run
from specjax.core.errors import SpecjaxError


def test_every_question_gets_an_answer(capsys):
    _run(Options(size="tiny", context=160, rounds=1, runs=1))
    printed = capsys.readouterr().out
    assert "plain step" in printed
    for count in DRAFTED:
        assert f"round of pld-plus, {count} drafted" in printed
    assert "drafting alone, pld-plus-attention" in printed
    assert "not measured on this machine: 7b (--size 7b)" in printed


@pytest.mark.parametrize(
    "options, message",
    [
        (Options(size="8t"), "size '8t' is unknown; choose one of 160m, 7b, tiny"),
        (Options(size="tiny", context=100), "context at least 142"),
        (Options(size="tiny", runs=0), "runs must be at least 1"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(SpecjaxError, match=message):
        _run(options)
