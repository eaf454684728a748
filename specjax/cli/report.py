"""`specjax report`: writes the report of a benchmark."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg


@dataclass(frozen=True)
class ReportCommand:
    """Write the results of `specjax bench --out FOLDER` as a Markdown file with charts.

    FOLDER/report.md refers to PNG files beside it. It includes the curves that `specjax tune
    pld-plus --plots FOLDER` has written.

      specjax bench --out runs/bench && specjax report runs/bench
    """

    folder: Annotated[Positional[Path], arg(metavar="FOLDER")]
    """The folder that `specjax bench --out` wrote."""

    def run(self) -> None:
        """Writes the report and prints its path."""
        from specjax.bench.report.markdown import write_report

        print(f"written to {write_report(self.folder)}")
