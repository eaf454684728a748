"""Pocket's datastore for REST: `python -m specjax.pocket.datastore --out DIR`.

Functions and small classes of the training modules, in an order that mixes modules, up to a size
that may ship with the package. It takes seconds.
"""

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro
from tokenizers import Tokenizer

from specjax import datastore
from specjax.core.errors import exit_code
from specjax.pocket import corpus
from specjax.pocket import tokenizer as tokenizers

WEIGHTS = Path(__file__).parent / "weights"


@dataclass(frozen=True)
class Options:
    """Build pocket's datastore."""

    out: Path
    """A new folder."""
    num_tokens: int = 400_000
    """Stop with the document that reaches so many tokens."""


def documents(tokenizer: Tokenizer, num_tokens: int) -> Iterator[Sequence[int]]:
    """Pieces of the training modules as token ids, `num_tokens` together."""
    pieces = list(corpus.pieces(held_out=False))
    random.Random(0).shuffle(pieces)
    count = 0
    for piece in pieces:
        ids = tokenizer.encode(piece, add_special_tokens=False).ids
        yield ids
        count += len(ids)
        if count >= num_tokens:
            return


def _run(options: Options) -> None:
    tokenizer = tokenizers.load(WEIGHTS / "target")
    made = datastore.build(
        documents(tokenizer, options.num_tokens),
        vocab_size=tokenizer.get_vocab_size(),
        fingerprint=datastore.tokenizer_fingerprint(tokenizer),
        sources=["the standard library of Python, training modules"],
    )
    datastore.save(made, options.out)
    print(f"{made.num_tokens} tokens of {made.num_documents} documents in {options.out}")


if __name__ == "__main__":
    sys.exit(exit_code(partial(_run, tyro.cli(Options, description=__doc__))))
