"""Attributes given texts to their prompts as PLD+ (h) would, and scores that (appendix D)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from specjax.core.text import num_equal
from specjax.decoding.state import NO_SOURCE
from specjax.run.attribution import spans_of


def forced_sources(
    text: Sequence[int], prompt_length: int, states: Float[np.ndarray, "T D"], num_tokens: int = 70
) -> list[int]:
    """Returns the sources that PLD+ (h) would report if the target had generated this output.

    `states` are the target's hidden states at every position. Only the prompt is searched and
    copied from.
    """
    tokens = np.asarray(text)
    unit = states / np.maximum(np.linalg.norm(states, axis=-1, keepdims=True), 1e-12)
    source = np.full(len(tokens), NO_SOURCE)
    root = prompt_length - 1
    while root < len(tokens):
        candidates = 1 + np.flatnonzero(tokens[1 : min(root, prompt_length)] == tokens[root])
        count = 0
        if len(candidates):
            best = int(candidates[np.argmax(unit[candidates - 1] @ unit[root - 1])])
            end = min(best + 1 + num_tokens, prompt_length)
            count = num_equal(text[best + 1 : end], text[root + 1 :])
        if count:
            source[root : root + count + 1] = np.arange(best, best + count + 1)
        root += count + 1
    return source[prompt_length:].tolist()


class Scores(NamedTuple):
    """Precision, recall and F1 of the tokens attributed to the prompt, from 0 to 1."""

    precision: float
    recall: float
    f1: float


def score(copied: Bool[np.ndarray, " n"], true: Bool[np.ndarray, " n"]) -> Scores:
    """Scores one text token by token; precision and recall are 1 where they would divide by 0."""
    both = int(np.sum(copied & true))
    precision = both / np.sum(copied) if copied.any() else 1.0
    recall = both / np.sum(true) if true.any() else 1.0
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return Scores(float(precision), float(recall), float(f1))


def is_copied(source: Sequence[int], min_tokens: int) -> Bool[np.ndarray, " n"]:
    """Returns which tokens lie in spans of at least `min_tokens` tokens."""
    copied = np.zeros(len(source), bool)
    for span in spans_of(source, min_tokens):
        copied[span.start : span.end] = True
    return copied
