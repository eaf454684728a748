"""Builds the length classifier's training data: the draft's guess at every token of texts.

DISCO, appendix D.1: the target generates a text, and the draft predicts one token after each prefix
of it. Positions within the draft are here the number of tokens since the last mismatch: a draft of
unlimited length restarts after every mismatch, so each token is drafted exactly once, at that
depth. The appendix counts positions differently than section 4.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int

from specjax.core.errors import SpecjaxError
from specjax.core.ranking import best_token
from specjax.models.cache import KVCache
from specjax.models.fingerprint import FrozenModel
from specjax.models.heads.length_classifier import (
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
    is_match: Bool[np.ndarray, " N"]  # the label: the draft's most likely token is the target's
    depth: Int[np.ndarray, " N"]  # tokens since the last mismatch, whatever the features count
    prompt: Int[np.ndarray, " N"]  # number of the text

    def select(self, is_selected: Bool[np.ndarray, " N"]) -> "DraftFeatures":
        """Returns the selected tokens."""
        return DraftFeatures(*(values[is_selected] for values in vars(self).values()))


def read_drafts(
    texts: Sequence[ContinuedPrompt],
    draft: FrozenModel,
    position: PositionKind = "draft",
) -> DraftFeatures:
    """Computes features and labels of all tokens of the continuations, in one pass per text.

    Positions count since the last mismatch ("draft") or since the prompt ("generation"). Tokens
    beyond the draft's last position are left out: it drafts none there.
    """
    # A token is drafted after a pass over its predecessor, which must have a position.
    end = draft.model.config.longest_text + 1
    texts = [
        ContinuedPrompt(prompt, continuation[: max(0, end - len(prompt))])
        for prompt, continuation in texts
    ]
    readings = dict(_read_texts(texts, draft))
    if not readings:
        raise SpecjaxError(
            "the target continued no prompt within the draft's positions; give shorter prompts, or "
            "others that it answers"
        )
    parts = []
    for number, reading in sorted(readings.items()):
        is_match = reading.choice == np.asarray(texts[number].continuation)
        depth, count = run_lengths(is_match), len(is_match)
        counted = jnp.asarray(depth if position == "draft" else np.arange(count))
        features = np.asarray(with_position(jnp.asarray(reading.features), counted))
        parts.append((features, is_match, depth, np.full(count, number)))
    return DraftFeatures(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


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


def _read_texts(
    texts: Sequence[ContinuedPrompt], draft: FrozenModel
) -> Iterator[tuple[int, Reading]]:
    """Yields number and reading of each text that has a continuation, the shortest first."""
    order = [number for number, text in enumerate(texts) if len(text.continuation)]
    order.sort(key=lambda number: texts[number].length)
    for start in range(0, len(order), BATCH):
        numbers = order[start : start + BATCH]
        tokens, prompt_length = _padded([texts[number] for number in numbers])
        read = _read(draft.params, tokens, prompt_length, model=draft.model)
        seen = jax.tree.map(np.asarray, read)
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


@partial(jax.jit, static_argnames="model")
def _read(
    params: Any, tokens: Int[Array, "B T"], prompt_length: Int[Array, " B"], *, model: Target
) -> Reading:
    """Runs the draft chunk by chunk; no logits outlive a chunk."""
    batch, length = tokens.shape

    def read_chunk(cache: KVCache, part: Int[Array, "B C"]) -> tuple[KVCache, Reading]:
        output, cache = model.run(params, causal_rows(part, cache.length), cache)
        probs = jax.nn.softmax(cast(Array, output.logits), axis=-1)
        seen = Reading(features=distribution_features(probs), choice=best_token(probs))
        return cache.advance(jnp.full_like(cache.length, CHUNK)), seen

    chunks = tokens.reshape(batch, -1, CHUNK).swapaxes(0, 1)
    cache = model.new_cache(params, batch, length, prompt_length)
    _, seen = jax.lax.scan(read_chunk, cache, chunks)
    return jax.tree.map(
        lambda part: part.swapaxes(0, 1).reshape(batch, length, *part.shape[3:]), seen
    )
