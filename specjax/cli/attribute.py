"""`specjax attribute`: scores the attribution of copied tokens on texts with known quotes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from specjax.cli.options import TargetOptions
from specjax.core.errors import SpecjaxError, warn


@dataclass(frozen=True, kw_only=True)
class Attribute(TargetOptions):
    """Score the attribution of PLD+ on answers with known quotes, in QuoteSum's format.

    A token counts as copied if it lies in a span, of at least a given number of tokens, that PLD+
    would have copied had the target written the answer. To see the sources of text that the target
    generates, use `specjax generate --attribute`.

      specjax attribute quotesum.jsonl --limit 100
    """

    file: Annotated[Positional[Path], arg(metavar="FILE")]
    """A JSONL file with `question`, `source1` to `source8` and a `summary` with marked quotes."""
    layer: int | None = None
    """The layer whose hidden states to compare; by default that of --method pld-plus."""
    thresholds: tuple[int, ...] = (2, 5, 8)
    """Minimum lengths of a span, in tokens; each is scored."""
    limit: int | None = None
    """The number of examples to use; by default all."""

    def run(self) -> None:
        """Scores the file and prints the table."""
        from rich.console import Console
        from rich.table import Table

        from specjax.core.companions import companion
        from specjax.core.files import expand_user
        from specjax.loading.drafters import load_drafter
        from specjax.models.target import Taps

        if min(self.thresholds, default=0) < 1 or (self.limit is not None and self.limit < 1):
            raise SpecjaxError("--thresholds and --limit must be at least 1")
        quotesum = companion("papers.quotesum")
        examples, warnings = quotesum.read_quotesum(expand_user(self.file))
        for line in warnings:
            warn(line)
        target = self.load_target()
        drafter, _ = load_drafter("pld-plus", target)
        layers = drafter.taps.hidden_layers if self.layer is None else (self.layer,)
        Taps(layers).check(target.config)
        scores = quotesum.evaluate(
            examples[: self.limit],
            target.model,
            target.params,
            target.require_tokenizer(),
            layers[0],
            drafter.max_depth,
            self.thresholds,
        )
        table = Table("min span", "precision", "recall", "F1", box=None)
        for min_span, row in scores.items():
            table.add_row(str(min_span), *(f"{share:.3f}" for share in row))
        Console(soft_wrap=True, markup=False, highlight=False).print(table)
        print(f"token-level scores, averaged over {len(examples[: self.limit])} examples")
