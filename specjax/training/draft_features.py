"""Training data of the length classifier: the draft judged at every token of the target's texts.

DISCO, appendix D.1: the target writes its text, and for each prefix of it the draft makes one
token. What the position counts is told there in another way than in section 4. Within the draft
(the default, and what the classifier sees while it drafts) is here the number of tokens since the
last mismatch: a draft of unlimited length starts anew behind every mismatch, where the target has
put its own token, so each token of the text is drafted exactly once, at that depth. A draft of
limited length starts anew more often; its depths are among these.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float32, Int

from specjax.core.errors import SpecjaxError
from specjax.models.heads.length_classifier import LabelKind, PositionKind, with_position
from specjax.training.draft_reading import (
    FrozenModel,
    Reading,
    Text,
    check_vocabularies,
    read_texts,
)


@dataclass(frozen=True, eq=False)
class DraftFeatures:
    """One row for each new token of the target's texts; N rows, in the order of the texts."""

    features: Float32[np.ndarray, "N 12"]
    labels: Float32[np.ndarray, " N"]  # 0 or 1, or between for overlap
    is_match: Bool[np.ndarray, " N"]  # the draft's most likely token is the target's
    depth: Int[np.ndarray, " N"]  # tokens since the last mismatch, whatever the features hold
    prompt: Int[np.ndarray, " N"]  # number of the text

    def rows(self, wanted: Bool[np.ndarray, " N"]) -> "DraftFeatures":
        """The rows where `wanted` is true."""
        columns = (self.features, self.labels, self.is_match, self.depth, self.prompt)
        return DraftFeatures(*(column[wanted] for column in columns))


def read_drafts(
    texts: Sequence[Text],
    target: FrozenModel,
    draft: FrozenModel,
    position: PositionKind = "draft",
    labels: LabelKind = "match",
) -> DraftFeatures:
    """Features and labels of all tokens of the continuations, from one pass over each text.

    Args:
        texts: prompts with the target's own continuations; empty continuations give no rows.
        target: is run only for labels of the overlap.
        draft: the model whose distributions the classifier sees.
        position: "draft" counts the tokens since the last mismatch, "generation" those since the
            prompt; both from 0.
        labels: "match" is 1 where the most likely token of the draft is the target's next one;
            "overlap" is 1 - TV(draft, target), the chance that rejection sampling at temperature 1
            accepts.

    Raises:
        SpecjaxError: if no text has a continuation, or the models' vocabularies differ.
    """
    check_vocabularies(target, draft)
    readings = dict(read_texts(texts, draft, target if labels == "overlap" else None))
    if not readings:
        raise SpecjaxError("the target continued no prompt; give prompts that it answers")
    parts = [
        _rows_of(texts[number], number, readings[number], position, labels)
        for number in sorted(readings)
    ]
    return DraftFeatures(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _rows_of(
    text: Text, number: int, reading: Reading, position: PositionKind, labels: LabelKind
) -> tuple[np.ndarray, ...]:
    """The columns of `DraftFeatures` for one text."""
    count = len(text.continuation)
    is_match = reading.choice == np.asarray(text.continuation)
    depth = run_lengths(is_match)
    counted = jnp.asarray(depth if position == "draft" else np.arange(count))
    return (
        np.asarray(with_position(jnp.asarray(reading.features), counted)),
        is_match.astype(np.float32) if labels == "match" else reading.overlap,
        is_match,
        depth,
        np.full(count, number),
    )


def run_lengths(is_match: Bool[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
    """For each place, how many places directly before it match."""
    places = np.arange(len(is_match))
    starts = np.where(is_match, 0, places + 1)  # a run starts behind a mismatch
    starts = np.concatenate([[0], starts[:-1]])
    return places - np.maximum.accumulate(starts)


def split_by_prompt(
    data: DraftFeatures, fraction: float, seed: int
) -> tuple[DraftFeatures, DraftFeatures]:
    """Training and validation rows; `fraction` of the prompts, but at least one, validate.

    Raises:
        SpecjaxError: if there are fewer than two prompts with rows.
    """
    prompts = np.unique(data.prompt)
    if len(prompts) < 2:
        raise SpecjaxError(
            "training and validation need a prompt each; give at least 2 that the target continues"
        )
    count = min(max(1, round(fraction * len(prompts))), len(prompts) - 1)
    chosen = np.random.default_rng(seed).permutation(prompts)[:count]
    validates = np.isin(data.prompt, chosen)
    return data.rows(~validates), data.rows(validates)
