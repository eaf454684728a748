"""`specjax attribute`: how well copied tokens are found, on a file whose quotes are known."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from specjax.core.errors import SpecjaxError


@dataclass(frozen=True)
class Attribute:
    """Score the sources that PLD+ names for copied tokens, on questions in QuoteSum's format.

    The target reads the written answers; a token counts as copied where it stands in a span of at
    least so many tokens that PLD+ would have copied. `specjax generate --attribute` shows the
    sources of a text of the target's own.
    """

    file: Annotated[Positional[Path], arg(metavar="FILE")]
    """A JSONL file with `question`, `source1` to `source8` and a `summary` with marked quotes."""
    target: str = "pocket"
    """The model: pocket, a folder in Hugging Face format, or a hub id."""
    layer: int | None = None
    """The layer whose hidden states are compared; by default that of --method pld-plus."""
    thresholds: tuple[int, ...] = (2, 5, 8)
    """Least lengths of a span, in tokens."""
    limit: int | None = None
    """Use the first so many examples only."""
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, arg(metavar="float32|bfloat16|float16")
    ] = None
    """Of the weights and the arithmetic; by default float32 on CPU and bfloat16 elsewhere."""

    def run(self) -> None:
        """Scores and prints the table."""
        from rich.console import Console
        from rich.table import Table

        from specjax.bench.quotesum import evaluate, read_quotesum
        from specjax.cli.environment import use_compilation_cache
        from specjax.core.files import expand_user
        from specjax.hub import load
        from specjax.loading import load_drafter
        from specjax.models.target import Taps

        if min(self.thresholds, default=0) < 1 or (self.limit is not None and self.limit < 1):
            raise SpecjaxError("--thresholds and --limit must be at least 1")
        examples, complaints = read_quotesum(expand_user(self.file))
        for line in complaints:
            print("specjax:", line, file=sys.stderr)
        use_compilation_cache()
        target = load(self.target, dtype=self.dtype)
        drafter, _ = load_drafter("pld-plus", target)
        layers = drafter.taps.hidden_layers if self.layer is None else (self.layer,)
        Taps(layers).check(target.config)
        scores = evaluate(
            examples[: self.limit],
            target.model,
            target.params,
            target.require_tokenizer(),
            layers[0],
            drafter.max_depth,
            self.thresholds,
        )
        table = Table("least span", "precision", "recall", "F1", box=None)
        for least, row in scores.items():
            table.add_row(str(least), *(f"{share:.3f}" for share in row))
        Console(soft_wrap=True, markup=False, highlight=False).print(table)
        print(f"means over {len(examples[: self.limit])} examples, by tokens")
