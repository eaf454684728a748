"""oracle.json: draft lengths of the oracle, and what rules for the draft length gain."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user, read_json, writable

ORACLE = "oracle.json"


class OracleLengths(NamedTuple):
    """The oracle's draft lengths on one kind of task (DISCO, figures 3 to 6, table 2)."""

    task: str
    mean: float
    std: float
    course: Sequence[float | None]  # means by tenths of the run; None: no round began there
    histogram: Sequence[int]  # entry n: rounds that drafted n tokens; the last: and more


class RuleFigures(NamedTuple):
    """The gain of one rule for the draft length on one kind of task (DISCO, table 1)."""

    task: str
    rule: str
    ms_per_token: float
    ratio: float  # speed over plain's
    ratio_quartiles: Sequence[float]
    accepted_length: float
    identical: bool | None  # to plain decoding's text; None: not compared


class OracleResults(NamedTuple):
    """One comparison of rules for the draft length."""

    about: Mapping[str, Any]
    lengths: Sequence[OracleLengths]
    rules: Sequence[RuleFigures]
    equation_1: Sequence[str]  # predicted and measured gains of static lengths, in words


def write_oracle(folder: Path, found: OracleResults) -> Path:
    """Keeps the results in the folder, which is made if there is none; returns the file.

    Raises:
        SpecjaxError: if it cannot be written.
    """
    path = expand_user(folder) / ORACLE
    values = found._asdict() | {
        "lengths": [each._asdict() for each in found.lengths],
        "rules": [each._asdict() for each in found.rules],
    }
    with writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return path


def read_oracle(folder: Path) -> OracleResults | None:
    """Returns the results in the folder; None if there are none.

    Raises:
        SpecjaxError: if the file cannot be read, or is damaged.
    """
    path = expand_user(folder) / ORACLE
    if not path.is_file():
        return None
    values = read_json(path)
    try:
        return OracleResults(
            values["about"],
            [OracleLengths(**each) for each in values["lengths"]],
            [RuleFigures(**each) for each in values["rules"]],
            values["equation_1"],
        )
    except (KeyError, TypeError) as error:
        raise SpecjaxError(f"{path} is damaged ({error}); measure it again") from None
