"""`specjax bench` measures methods against plain decoding; `specjax report` writes a report."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from specjax.bench.options import BenchOptions
from specjax.cli.decoding_options import PassOptions


@dataclass(frozen=True)
class BenchCommand(PassOptions, BenchOptions):
    """Measure methods and plain decoding in turn on the same prompts, and compare medians.

    With --out, the same command resumes an interrupted benchmark.

      specjax bench
      specjax bench --methods pld,eagle2 --tasks humaneval.jsonl --out runs/bench
    """

    @property
    def if_stopped(self) -> str:
        """Advice on resuming an interrupted benchmark; empty if it cannot resume."""
        return "run the same command to resume" if self.out else ""

    def run(self) -> None:
        from specjax.bench.run import run_bench

        run_bench(self.load_target, self)
        if self.out is not None:
            print(f"kept in {self.out}; `specjax report {self.out}` writes a report of it")


@dataclass(frozen=True)
class ReportCommand:
    """Write the results of `specjax bench --out FOLDER` as a Markdown file with charts.

    FOLDER/report.md refers to PNG files beside it.

      specjax bench --out runs/bench && specjax report runs/bench
    """

    folder: Annotated[Positional[Path], arg(metavar="FOLDER")]
    """The folder that `specjax bench --out` wrote."""

    def run(self) -> None:
        from specjax.bench.report.markdown import write_report

        print(f"written to {write_report(self.folder)}")
