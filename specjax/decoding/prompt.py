"""Prompt: padded token rows with their true lengths."""

from collections.abc import Sequence, Sized

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax.core.chat import VICUNA, chat_ids
from specjax.core.errors import SpecjaxError
from specjax.core.pytree import pytree

__all__ = ["VICUNA", "Prompt", "chat_ids", "encode", "from_ids", "padded_length"]

BUCKET = 64  # prompts are padded to multiples of this, so that few lengths are compiled


@pytree
class Prompt:
    """B prompts, padded on the right; the padding may hold anything."""

    tokens: Int[Array, "B P"]
    length: Int[Array, " B"]


def from_ids(ids: Sequence[Sequence[int]], bucket: int = BUCKET) -> Prompt:
    """Pads rows of token ids to the next multiple of `bucket`."""
    if len(ids) == 0:
        raise SpecjaxError("no prompts given; pass at least one row of token ids")
    rows = [_row_of(number, tokens) for number, tokens in enumerate(ids)]
    padded = np.zeros((len(rows), padded_length(rows, bucket)), np.int32)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return Prompt(jnp.asarray(padded), jnp.asarray([len(row) for row in rows], jnp.int32))


def padded_length(rows: Sequence[Sized], bucket: int = BUCKET) -> int:
    """Returns the length to which `from_ids` pads these prompts.

    Pass it as `bucket` so that several batches share one compiled program.
    """
    return -(-max(map(len, rows)) // bucket) * bucket


def _row_of(number: int, tokens: Sequence[int]) -> np.ndarray:
    row = np.asarray(tokens)
    if row.size == 0:
        raise SpecjaxError(f"prompt {number} is empty; give at least 2 tokens")
    if row.ndim != 1 or row.dtype.kind not in "iu":
        raise SpecjaxError(f"prompt {number} is not one row of whole numbers; give token ids")
    if np.max(np.abs(row)) > np.iinfo(np.int32).max:
        raise SpecjaxError(f"prompt {number} holds {np.max(np.abs(row))}, beyond any vocabulary")
    return row


def encode(tokenizer, texts: Sequence[str], bucket: int = BUCKET) -> Prompt:
    """Tokenizes texts, with the BOS that the tokenizer adds, and pads them."""
    if isinstance(texts, str):
        raise SpecjaxError("encode takes a list of texts; wrap the single text in [...]")
    for row, text in enumerate(texts):
        if not text:
            raise SpecjaxError(f"prompt {row} is empty; write some text")
    return from_ids([tokenizer(text)["input_ids"] for text in texts], bucket)
