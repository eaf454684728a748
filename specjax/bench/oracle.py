"""What the oracle's drafts tell: how much the best draft length varies (DISCO, section 3).

Kept as JSON, with what the rules for the draft length are worth, for `specjax report`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.bench.summary import Measurement
from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user, read_json, writable

ORACLE_FILE = "oracle.json"
NUM_BARS = 10  # parts of a run, in which the oracle's lengths are told apart
MOST_SHOWN = 20  # longer drafts share the last bar of the histogram


class OracleLengths(NamedTuple):
    """What the oracle drafted on one kind of task (Figures 3 to 6, Table 2)."""

    task: str
    mean: float
    std: float
    course: tuple[float | None, ...]  # means by tenths of the run; None: no round began there
    histogram: tuple[int, ...]  # entry n: rounds that drafted n tokens; the last: and more


class RuleFigures(NamedTuple):
    """What one rule is worth on one kind of task (Table 1)."""

    task: str
    rule: str
    ms_per_token: float
    ratio: float  # speed over plain's
    ratio_quartiles: tuple[float, float]
    accepted_length: float
    identical: bool | None  # to what plain decoding said; None: not compared


class OracleResults(NamedTuple):
    """One comparison of rules."""

    about: Mapping[str, Any]
    lengths: Sequence[OracleLengths]
    rules: Sequence[RuleFigures]
    equation_1: Sequence[str]


def drafted_lengths(from_draft: Sequence[bool]) -> list[int]:
    """How many drafted tokens each round of a text committed: every other token ends a round."""
    lengths, count = [], 0
    for is_drafted in from_draft:
        count += is_drafted
        if not is_drafted:
            lengths.append(count)
            count = 0
    return [*lengths, count] if count else lengths  # the last round may have been cut


def oracle_lengths(task: str, runs: Iterable[Sequence[int]]) -> OracleLengths:
    """The figures of some texts, each given by the lengths of its rounds."""
    everything: list[int] = []
    bars: list[list[int]] = [[] for _ in range(NUM_BARS)]
    for run in runs:
        everything += run
        for number, length in enumerate(run):
            bars[number * NUM_BARS // len(run)].append(length)
    return OracleLengths(
        task,
        float(np.mean(everything)),
        float(np.std(everything)),
        tuple(float(np.mean(bar)) if bar else None for bar in bars),
        tuple(np.bincount(np.minimum(everything, MOST_SHOWN)).tolist()),
    )


def rule_figures(row: Measurement) -> RuleFigures:
    """The figures of a rule from its row of a comparison."""
    return RuleFigures(
        row.task,
        row.method,
        1e3 / row.tokens_per_second,
        row.ratio,
        row.ratio_quartiles,
        row.mean_accepted_length,
        row.identical,
    )


def improvement_factor(acceptance_rate: float, length: int, cost: float) -> float:
    """Equation 1: the gain of a static length; `cost` is that of a draft pass over a target's."""
    if acceptance_rate == 1:
        return (length + 1) / (length * cost + 1)
    tokens = (1 - acceptance_rate ** (length + 1)) / (1 - acceptance_rate)
    return tokens / (length * cost + 1)


def acceptance_rate(accepted_length: float, length: int) -> float:
    """The rate at which drafts of `length` would give this accepted length (bisection)."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        tokens = improvement_factor(middle, length, cost=0.0)
        low, high = (middle, high) if tokens < accepted_length else (low, middle)
    return (low + high) / 2


def write_oracle(folder: Path, found: OracleResults) -> Path:
    """Keeps the results in the folder, which is made if there is none; returns the file.

    Raises:
        SpecjaxError: if it cannot be written.
    """
    path = expand_user(folder) / ORACLE_FILE
    values = {
        "about": dict(found.about),
        "lengths": [each._asdict() for each in found.lengths],
        "rules": [each._asdict() for each in found.rules],
        "equation_1": list(found.equation_1),
    }
    with writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return path


def read_oracle(folder: Path) -> OracleResults | None:
    """The results in the folder; None if there are none.

    Raises:
        SpecjaxError: if the file cannot be read, or is damaged.
    """
    path = folder / ORACLE_FILE
    if not path.is_file():
        return None
    values = read_json(path)
    try:
        return OracleResults(
            values["about"],
            [OracleLengths(**_with_tuples(each)) for each in values["lengths"]],
            [RuleFigures(**_with_tuples(each)) for each in values["rules"]],
            values["equation_1"],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise SpecjaxError(f"{path} is damaged ({error}); measure it again") from None


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
