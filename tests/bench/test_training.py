"""What training a head costs: every step is timed, and wrong options are refused."""

import pytest

from specjax.bench.training import EAGLE, HASS, TARGET, Options, _run, cost_table
from specjax.core.errors import SpecjaxError


def test_every_step_is_timed(capsys):
    _run(Options(size="tiny", batch_size=2, length=16, repeats=1))
    printed = capsys.readouterr().out
    for name in (TARGET, EAGLE, *(HASS.format(steps) for steps in (1, 2, 3, 4))):
        assert name in printed


def test_costs_are_medians_of_pairs():
    table = cost_table(
        {TARGET: [1.0, 1.0, 1.0], EAGLE: [2.0, 4.0, 2.0], "other": [6.0, 4.0, 6.0]}, 8
    )
    columns = [list(column.cells) for column in table.columns]
    assert columns == [
        [TARGET, EAGLE, "other"],
        ["8", "4", "1"],
        ["0.50", "1.00", "3.00"],
        ["1.00", "2.00", "6.00"],
    ]


@pytest.mark.parametrize(
    "options, message",
    [
        (Options(size="8t"), "size '8t' is unknown"),
        (Options(repeats=0), "repeats must be at least 1"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(SpecjaxError, match=message):
        _run(options)
