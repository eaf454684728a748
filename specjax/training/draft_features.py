"""Builds the length classifier's training data: the draft's guess at every token of texts.

DISCO, appendix D.1: the target generates a text, and the draft predicts one token after each prefix
of it. Positions within the draft are here the number of tokens since the last mismatch: a draft of
unlimited length restarts after every mismatch, so each token is drafted exactly once, at that
depth. The appendix counts positions differently than section 4.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int

from specjax.core.errors import SpecjaxError
from specjax.core.ranking import best_token
from specjax.models.fingerprint import FrozenModel
from specjax.models.heads.length_classifier import (
    LabelKind,
    PositionKind,
    distribution_features,
    with_position,
)
from specjax.models.target import Target, causal_rows

CHUNK = 128  # tokens at a time: bounds the memory of logits; texts are padded to multiples of it
BATCH = 8  # texts at a time


class ContinuedPrompt(NamedTuple):
    """A prompt and how the target continues it, as token ids."""

    prompt: Sequence[int]
    continuation: Sequence[int]

    @property
    def length(self) -> int:
        """Tokens of both."""
        return len(self.prompt) + len(self.continuation)


@dataclass(frozen=True, eq=False)
class DraftFeatures:
    """One entry for each of the N new tokens of the target's texts, in the order of the texts."""

    features: Float32[np.ndarray, "N 12"]
    labels: Float32[np.ndarray, " N"]  # 0 or 1, or between for overlap
    is_match: Bool[np.ndarray, " N"]  # the draft's most likely token is the target's
    depth: Int[np.ndarray, " N"]  # tokens since the last mismatch, whatever the features count
    prompt: Int[np.ndarray, " N"]  # number of the text

    def select(self, is_selected: Bool[np.ndarray, " N"]) -> "DraftFeatures":
        """Returns the selected tokens."""
        return DraftFeatures(*(values[is_selected] for values in vars(self).values()))


def read_drafts(
    texts: Sequence[ContinuedPrompt],
    target: FrozenModel,
    draft: FrozenModel,
    position: PositionKind = "draft",
    labels: LabelKind = "match",
) -> DraftFeatures:
    """Computes features and labels of all tokens of the continuations, in one pass per text.

    Positions count since the last mismatch ("draft") or since the prompt ("generation"). The label
    "match" is 1 where the most likely token of the draft is the target's next one; "overlap" is
    1 - TV(draft, target), the chance that rejection sampling accepts.
    """
    check_vocabularies(target, draft)
    readings = dict(_read_texts(texts, draft, target if labels == "overlap" else None))
    if not readings:
        raise SpecjaxError("the target continued no prompt; give prompts that it answers")
    parts = []
    for number, reading in sorted(readings.items()):
        is_match = reading.choice == np.asarray(texts[number].continuation)
        depth, count = run_lengths(is_match), len(is_match)
        counted = jnp.asarray(depth if position == "draft" else np.arange(count))
        features = np.asarray(with_position(jnp.asarray(reading.features), counted))
        labelled = is_match.astype(np.float32) if labels == "match" else reading.overlap
        parts.append((features, labelled, is_match, depth, np.full(count, number)))
    return DraftFeatures(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def check_vocabularies(target: FrozenModel, draft: FrozenModel) -> None:
    """Raises SpecjaxError unless both models have vocabularies of one size."""
    sizes = [model.model.config.vocab_size for model in (target, draft)]
    if sizes[0] != sizes[1]:
        raise SpecjaxError(
            f"the draft has a vocabulary of {sizes[1]} tokens, the target one of {sizes[0]}; give "
            "a draft that shares the target's tokenizer"
        )


def split_by_prompt(
    data: DraftFeatures, fraction: float, seed: int
) -> tuple[DraftFeatures, DraftFeatures]:
    """Splits off `fraction` of the prompts, at least 1, for validation."""
    prompts = np.unique(data.prompt)
    if len(prompts) < 2:
        raise SpecjaxError(
            "training and validation need a prompt each; give at least 2 that the target continues"
        )
    count = min(max(1, round(fraction * len(prompts))), len(prompts) - 1)
    chosen = np.random.default_rng(seed).permutation(prompts)[:count]
    validates = np.isin(data.prompt, chosen)
    return data.select(~validates), data.select(validates)


def run_lengths(is_match: Bool[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
    """Counts the matches directly before each place."""
    places = np.arange(len(is_match))
    starts = np.where(is_match, 0, places + 1)  # a run starts after a mismatch
    starts = np.concatenate([[0], starts[:-1]])
    return places - np.maximum.accumulate(starts)


# ---- One teacher-forced pass over whole texts --------------------------------------------------


class Reading(NamedTuple):
    """The draft's guess at each of the N tokens of a continuation, given all tokens before it."""

    features: Any  # [N, 11], of its distribution
    choice: Any  # [N], its most likely token
    overlap: Any  # [N], 1 - total variation distance to the target, meaningless if that did not run


def _read_texts(
    texts: Sequence[ContinuedPrompt], draft: FrozenModel, target: FrozenModel | None
) -> Iterator[tuple[int, Reading]]:
    """Yields number and reading of each text that has a continuation, the shortest first."""
    owners = (draft,) if target is None else (draft, target)
    models, params = zip(*((owner.model, owner.params) for owner in owners), strict=True)
    order = [number for number, text in enumerate(texts) if len(text.continuation)]
    order.sort(key=lambda number: texts[number].length)
    for start in range(0, len(order), BATCH):
        numbers = order[start : start + BATCH]
        tokens, prompt_length = _padded([texts[number] for number in numbers])
        seen = jax.tree.map(np.asarray, _read(params, tokens, prompt_length, models=models))
        for index, number in enumerate(numbers):
            first = len(texts[number].prompt) - 1  # the prompt's last token predicts the first
            last = texts[number].length - 1
            yield number, Reading(*(values[index, first:last] for values in seen))


def _padded(texts: Sequence[ContinuedPrompt]) -> tuple[Int[Array, "B T"], Int[Array, " B"]]:
    """Returns padded texts, T a multiple of CHUNK, and their prompts' lengths; B is BATCH."""
    longest = max(text.length for text in texts)
    tokens = np.zeros((BATCH, -(-longest // CHUNK) * CHUNK), np.int32)
    prompt_length = np.zeros(BATCH, np.int32)
    for index, text in enumerate(texts):
        tokens[index, : text.length] = [*text.prompt, *text.continuation]
        prompt_length[index] = len(text.prompt)
    return jnp.asarray(tokens), jnp.asarray(prompt_length)


@partial(jax.jit, static_argnames="models")
def _read(
    params: tuple[Any, ...],
    tokens: Int[Array, "B T"],
    prompt_length: Int[Array, " B"],
    *,
    models: tuple[Target, ...],
) -> Reading:
    """Runs the draft, and the target if given, chunk by chunk; no logits outlive a chunk."""
    batch, length = tokens.shape
    caches = tuple(
        model.new_cache(of_model, batch, length, prompt_length)
        for model, of_model in zip(models, params, strict=True)
    )

    def read_chunk(caches, part):
        runs: list[Any] = [
            model.run(of_model, causal_rows(part, cache.length), cache)
            for model, of_model, cache in zip(models, params, caches, strict=True)
        ]
        probs = [jax.nn.softmax(output.logits, axis=-1) for output, _ in runs]
        first, last = probs[0], probs[-1]
        count = jnp.full(part.shape[:1], part.shape[1])
        seen = Reading(
            features=distribution_features(first),
            choice=best_token(first),
            overlap=jnp.sum(jnp.minimum(first, last), axis=-1),
        )
        return tuple(cache.advance(count) for _, cache in runs), seen

    chunks = tokens.reshape(batch, -1, CHUNK).swapaxes(0, 1)
    _, seen = jax.lax.scan(read_chunk, caches, chunks)
    return jax.tree.map(
        lambda part: part.swapaxes(0, 1).reshape(batch, length, *part.shape[3:]), seen
    )
