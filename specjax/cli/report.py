"""`specjax report`: writes the results of a benchmark as pages."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg


@dataclass(frozen=True)
class ReportCommand:
    """Write the results of `specjax bench --out FOLDER` as pages, in HTML and Markdown.

    FOLDER/report.html is self-contained; FOLDER/report.md has its plots in files. They include the
    curves that `specjax tune pld-plus --plots FOLDER` has written.

      specjax bench --out runs/bench && specjax report runs/bench
    """

    folder: Annotated[Positional[Path], arg(metavar="FOLDER")]
    """The folder that `specjax bench --out` wrote."""

    def run(self) -> None:
        """Writes the pages and prints their paths."""
        from specjax.bench.report.contents import read_contents
        from specjax.bench.report.html import write_page
        from specjax.bench.report.markdown import write_markdown
        from specjax.core.files import check_writable, expand_user

        folder = expand_user(self.folder)
        contents = read_contents(folder)
        for page in ("report.html", "report.md"):
            check_writable(folder / page, is_file=True)
        for path in (write_page(contents, folder), write_markdown(contents, folder)):
            print(f"written to {path}")
