"""Compares the papers' claims with a finished benchmark: python -m benchmarks.claims FOLDER

FOLDER is that of `specjax bench --methods all --temperature 0,1 --out FOLDER`; the claims read what
is there. `python -m benchmarks.claims.ablations --out FOLDER` adds evidence, and so does `python -m
benchmarks.claims.traces --out FOLDER`; claims without any are listed with the command that would
measure them.
"""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from benchmarks.claims.report import claims_of, report
from benchmarks.harness import main
from specjax.bench.checks import problems
from specjax.bench.results import read_results
from specjax.core.files import expand_user, write_whole


@dataclass(frozen=True)
class ClaimsOptions:
    """The options of this benchmark."""

    folder: Positional[Path]  # folder of a finished `specjax bench --out`
    out: str = ""  # also write the report to this Markdown file


def run(options: ClaimsOptions) -> None:
    """Prints the report, and writes it to `--out`."""
    folder = expand_user(options.folder)
    results = read_results(folder)
    text = report(claims_of(folder), results.about, problems(results.rows))
    print(text)
    if options.out:
        path = expand_user(options.out)
        write_whole(path, text.encode())
        print(f"written to {path}")


if __name__ == "__main__":
    main(run, ClaimsOptions, __doc__)
