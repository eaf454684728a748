"""`specjax attribute`: scores the attribution of copied tokens on texts with known quotes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from specjax.cli.decoding_options import TargetOptions
from specjax.core.settings import setting
from specjax.core.text import safe_console


@dataclass(frozen=True, kw_only=True)
class Attribute(TargetOptions):
    """Score the attribution of PLD+ on answers with known quotes, in QuoteSum's format.

    A token counts as copied if it lies in a span of at least --thresholds tokens that PLD+ would
    have copied if the target had generated the answer. To see the sources of generated text, use
    `specjax generate --attribute`.

      specjax attribute quotesum.jsonl --limit 100
    """

    file: Annotated[Positional[Path], arg(metavar="FILE")]
    """A JSONL file with `question`, `source1` to `source8` and a `summary` with marked quotes."""
    layer: int | None = None
    """The layer whose hidden states to compare; by default that of --method pld-plus."""
    thresholds: tuple[int, ...] = setting((2, 5, 8), at_least=1)
    """Minimum lengths of a span, in tokens; each is scored."""
    limit: int | None = setting(None, at_least=1)
    """The number of examples to use; by default all."""

    def run(self) -> None:
        """Scores the file and prints the table."""
        from rich.table import Table

        from .quotesum import evaluate, read_quotesum

        examples = read_quotesum(self.file, self.limit)
        scores = evaluate(examples, self.load_target(), self.layer, self.thresholds)
        table = Table("min span", "precision", "recall", "F1", box=None)
        for min_span, row in scores.items():
            table.add_row(str(min_span), *(f"{share:.3f}" for share in row))
        safe_console(soft_wrap=True).print(table)
        print(f"token-level scores, averaged over {len(examples)} examples")
