"""Scores the attribution of copied tokens on QuoteSum (Schuster et al. 2023; PLD+, table 10).

QuoteSum's answers are written by people, and every quote is marked with its source: `[ 2 like this
]`. The target reads sources, question and the answer without its marks; PLD+ then names the source
of each token as if it were drafting.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from specjax import LoadedTarget, Prompt, SpecjaxError, Target, from_ids, load_drafter
from specjax.data.records import good_records, read_records
from specjax.models import Taps, causal_rows

from .attribution import Scores, forced_sources, is_copied, score

MARK = re.compile(r"\[ ([1-9]) ([^\[\]]*?) ?\]")
NUM_SOURCES = 8
NUM_TOKENS = 70  # of a copy, as published
BUCKET = 256  # texts share the programs of the next multiple


@dataclass(frozen=True)
class QuoteSumExample:
    """One question with its sources and an answer whose quotes are known."""

    context: str
    answer: str
    quotes: tuple[tuple[int, int], ...]  # characters of the answer, from and to (exclusive)


def read_quotesum(source: str | Path, limit: int | None = None) -> list[QuoteSumExample]:
    """Returns the first `limit` examples of a JSONL file or its address; warns of other lines."""
    expected = "QuoteSum example; give a JSONL file of QuoteSum's"
    return list(good_records(source, read_records(source), _checked, expected, limit))


def _checked(record: Any) -> QuoteSumExample:
    try:
        return _example(record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise SpecjaxError(f"is not a QuoteSum example ({reason})") from None


def evaluate(
    examples: Sequence[QuoteSumExample],
    target: LoadedTarget,
    layer: int | None,
    thresholds: Sequence[int],
) -> dict[int, Scores]:
    """Returns the scores for each minimum length of a span, averaged over the examples.

    `layer` is the one whose hidden states are compared; None: the default of PLD+.
    """
    settings: dict[str, Any] = {} if layer is None else {"layer": layer}
    drafter, _ = load_drafter("pld-plus", target, **settings)
    layer = drafter.taps.hidden_layers[0]
    scores: dict[int, list[Scores]] = {least: [] for least in thresholds}
    tokenizer = target.require_tokenizer()
    texts = [tokens_of(example, tokenizer) for example in examples]
    longest = max(len(text) for text, _, _ in texts)
    if longest > target.config.longest_text:
        raise SpecjaxError(
            f"an example has {longest} tokens, more than the {target.config.longest_text} of this "
            "target; take a target for longer texts"
        )
    for text, prompt_length, true in texts:
        padded = hidden_states(target.params, from_ids([text], BUCKET), target.model, layer)
        states = np.asarray(padded[0, : len(text)], np.float32)
        source = forced_sources(text, prompt_length, states, NUM_TOKENS)
        for least in thresholds:
            scores[least].append(score(is_copied(source, least), true))
    return {
        least: Scores(*(fmean(column) for column in zip(*of_texts, strict=True)))
        for least, of_texts in scores.items()
    }


def tokens_of(
    example: QuoteSumExample, tokenizer: Any
) -> tuple[list[int], int, Bool[np.ndarray, " n"]]:
    """Returns the tokens of context and answer, the context's length, and which are quoted."""
    context = tokenizer(example.context)["input_ids"]
    answer = tokenizer(example.answer, add_special_tokens=False, return_offsets_mapping=True)
    is_quoted = [
        any(max(start, first) < min(end, last) for first, last in example.quotes)
        for start, end in answer["offset_mapping"]
    ]
    return [*context, *answer["input_ids"]], len(context), np.array(is_quoted, bool)


@partial(jax.jit, static_argnames=("target", "layer"))
def hidden_states(params: Any, prompt: Prompt, target: Target, layer: int) -> Float[Array, "1 T D"]:
    """Returns the hidden states of one layer at every token of a text."""
    rows = causal_rows(prompt.tokens, jnp.zeros(1, jnp.int32))
    num_slots = prompt.tokens.shape[1]
    cache = target.new_cache(params, 1, num_slots, prompt_length=prompt.length)
    output, _ = target.run(params, rows, cache, Taps(hidden_layers=(layer,), logits=False))
    assert output.hidden is not None
    return output.hidden[:, :, 0]


def _example(fields: dict[str, Any]) -> QuoteSumExample:
    sources = [
        f"{fields.get(f'title{number}') or ''}: {fields[f'source{number}']}"
        for number in range(1, NUM_SOURCES + 1)
        if fields.get(f"source{number}")
    ]
    if not sources:
        raise ValueError("no source1 to source8")
    names = [f"{kind}{n}" for kind in ("title", "source") for n in range(1, NUM_SOURCES + 1)]
    texts = [*filter(None, map(fields.get, names)), fields["question"]]
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise TypeError(f"{wrong[0]!r} is not a text")
    context = "\n".join([*sources, f"Question: {fields['question']}", "Answer: "])
    answer, quotes, end = "", [], 0
    for mark in MARK.finditer(fields["summary"]):
        answer += fields["summary"][end : mark.start()]
        quotes.append((len(answer), len(answer) + len(mark[2])))
        answer += mark[2]
        end = mark.end()
    answer += fields["summary"][end:]
    if not answer.strip():
        raise ValueError("an empty summary")
    return QuoteSumExample(context, answer, tuple(quotes))
