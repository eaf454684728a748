"""Methods compared in turn, without a folder to keep the runs in."""

from collections.abc import Sequence

from specjax.bench.measure import Contestant, Request, batches_of, measure, warm_up
from specjax.bench.summary import Compare, Measurement, exactly, summarise


def compare_in_turn(
    contestants: Sequence[Contestant],
    requests: Sequence[Request],
    num_runs: int,
    compare: Compare = exactly,
    num_rows: int = 1,
) -> list[Measurement]:
    """Measures at one temperature and returns the rows, kept nowhere.

    Requests of one kind stand together, and plain decoding is among the contestants.
    """
    batches = batches_of(requests, num_rows)
    programs = warm_up(contestants, batches[0])
    return summarise(measure(contestants, batches, num_runs), programs, compare)
