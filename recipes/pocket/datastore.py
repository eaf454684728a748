"""Builds pocket's datastore for REST: `python -m recipes.pocket.datastore --out DIR`.

It holds pieces of the training modules, shuffled, up to a size that may ship with the package. It
takes seconds.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.harness import main
from recipes.pocket import corpus
from recipes.pocket.tokenizer import load
from specjax.data import datastore
from specjax.loading.hub import pocket_folder


@dataclass(frozen=True)
class Options:
    """Build pocket's datastore."""

    out: Path
    """A new folder."""
    num_tokens: int = 400_000
    """Stop with the piece that reaches this number."""


def documents(tokenizer: Tokenizer, num_tokens: int) -> Iterator[Sequence[int]]:
    """Yields pieces of the training modules as tokens, `num_tokens` of them or a few more."""
    pieces = list(corpus.pieces(held_out=False))
    random.Random(0).shuffle(pieces)
    count = 0
    for piece in pieces:
        ids = tokenizer.encode(piece, add_special_tokens=False).ids
        yield ids
        count += len(ids)
        if count >= num_tokens:
            return


def build(options: Options) -> None:
    """Writes the datastore."""
    tokenizer = load(pocket_folder())
    made = datastore.build(
        documents(tokenizer, options.num_tokens),
        vocab_size=tokenizer.get_vocab_size(),
        fingerprint=datastore.tokenizer_fingerprint(tokenizer),
        sources=["the standard library of Python, training modules"],
    )
    datastore.save(made, options.out)
    about = made.metadata
    print(f"{about.num_tokens} tokens of {about.num_documents} documents in {options.out}")


if __name__ == "__main__":
    main(build, Options, __doc__)
