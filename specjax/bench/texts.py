"""How each token of a text came: drafted and accepted, or added by the target."""

from collections.abc import Iterator, Sequence
from typing import Any

from specjax.bench.measure import Sample
from specjax.bench.results import Stage
from specjax.core.text import GrowingText

LONGEST_PROMPT = 600  # characters of a prompt's end that are kept


def texts_of(stage: Stage, samples: Sequence[Sample], tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Of every method, the text of the first prompt of each kind, token by token.

    A round ends with a token that was not drafted (ParallelSpec, figure 5).
    """
    seen = set()
    for sample in sorted(samples, key=lambda each: each.number):
        kind, text = sample.batch[0].kind, sample.texts[0]
        is_told = len(text.from_draft) == len(text.tokens)
        if (sample.method, kind) in seen or not is_told:
            continue
        seen.add((sample.method, kind))
        yield {
            **stage._asdict(),
            "method": sample.method,
            "kind": kind,
            "prompt": tokenizer.decode(sample.batch[0].ids)[-LONGEST_PROMPT:],
            "pieces": pieces(text.tokens, tokenizer),
            "from_draft": list(text.from_draft),
        }


def pieces(tokens: Sequence[int], tokenizer: Any) -> list[str]:
    """What each token adds to the text; a character that takes several comes with the last."""
    growing = GrowingText(tokenizer)
    found = [growing.add(token) for token in tokens]
    return [*found[:-1], found[-1] + growing.finish()] if found else []
