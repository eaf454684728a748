"""`specjax report`: the results of a benchmark as pages."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from specjax.core.errors import SpecjaxError


@dataclass(frozen=True)
class Report:
    """Make pages of what `specjax bench --out DIR` has measured: DIR/report.html, one file that
    needs no network, and DIR/report.md with its pictures beside it.

    They also show what `python -m specjax.bench.draft_lengths --out DIR` and `specjax tune
    pld-plus --plots DIR` have left there.
    """

    folder: Annotated[Positional[Path], arg(metavar="DIR")]
    """The folder of the results."""

    def run(self) -> None:
        """Writes the pages, and tells where they are."""
        from importlib.util import find_spec

        if find_spec("matplotlib") is None:
            raise SpecjaxError("a report has pictures; run `pip install matplotlib`")

        from specjax.bench.pages.contents import read_contents
        from specjax.bench.pages.html import write_page
        from specjax.bench.pages.markdown import write_markdown
        from specjax.core.files import expand_user

        folder = expand_user(self.folder)
        contents = read_contents(folder)
        for path in (write_page(contents, folder), write_markdown(contents, folder)):
            print(f"written to {path}")
