"""Prompts: padded token ids with their lengths."""

from collections.abc import Sequence, Sized

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax.core.chat import chat_ids, check_tokenizer
from specjax.core.errors import SpecjaxError, check_characters, check_whole
from specjax.core.pytree import pytree

__all__ = ["Prompt", "chat_ids", "encode", "from_ids", "padded_length"]

BUCKET = 64  # prompts are padded to multiples of this, so that few lengths are compiled


@pytree
class Prompt:
    """B prompts, padded on the right with arbitrary tokens."""

    tokens: Int[Array, "B P"]
    length: Int[Array, " B"]

    @property
    def ids(self) -> list[tuple[int, ...]]:
        """The tokens of each prompt, without the padding."""
        rows = zip(self.tokens.tolist(), self.length.tolist(), strict=True)
        return [tuple(tokens[:length]) for tokens, length in rows]


def from_ids(ids: Sequence[Sequence[int]], bucket: int = BUCKET) -> Prompt:
    """Pads lists of token ids to the next multiple of `bucket`.

    Raises:
        SpecjaxError: for a bucket below 1, no prompts, an empty one, or one without token ids.
    """
    check_whole("bucket", bucket, 1)
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Sized):
        raise SpecjaxError(f"ids is of type {type(ids).__name__}; pass a list of lists of ids")
    if len(ids) == 0:
        raise SpecjaxError("no prompts given; pass at least one list of token ids")
    prompts = [_array_of(number, tokens) for number, tokens in enumerate(ids)]
    padded = np.zeros((len(prompts), padded_length(prompts, bucket)), np.int32)
    for number, tokens in enumerate(prompts):
        padded[number, : len(tokens)] = tokens
    return Prompt(jnp.asarray(padded), jnp.asarray(list(map(len, prompts)), jnp.int32))


def padded_length(prompts: Sequence[Sized], bucket: int = BUCKET) -> int:
    """Returns the length to which `from_ids` pads these prompts.

    Pass it as `bucket` so that several batches share one compiled program.
    """
    return -(-max(map(len, prompts)) // bucket) * bucket


def doubled_length(prompt: Sized, shortest: int = 256) -> int:
    """Returns `shortest`, doubled until a prompt fits.

    Pass it as `bucket` for prompts that come one by one, so that few programs are compiled.
    """
    while shortest < len(prompt):
        shortest *= 2
    return shortest


def _array_of(number: int, tokens: Sequence[int]) -> np.ndarray:
    try:
        array = np.asarray(tokens)
    except ValueError:  # lists of different lengths
        array = np.empty(1, object)  # which is rejected below
    if array.size == 0:
        raise SpecjaxError(f"prompt {number} is empty; give at least 2 tokens")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise SpecjaxError(f"prompt {number} is not a list of whole numbers; give token ids")
    if (beyond := array[array != array.astype(np.int32)]).size:
        raise SpecjaxError(
            f"prompt {number} holds {beyond[0]}, beyond any vocabulary; check its ids"
        )
    return array


def encode(tokenizer, texts: Sequence[str], bucket: int = BUCKET) -> Prompt:
    """Tokenizes texts, with the BOS that the tokenizer adds, and pads them.

    Raises:
        SpecjaxError: for no texts, an empty one, or what is not text.
    """
    if not isinstance(texts, (list, tuple)):
        raise SpecjaxError("encode takes a list of texts; wrap the single text in [...]")
    for number, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            problem = "is not a string" if text else "is empty"
            raise SpecjaxError(f"prompt {number} {problem}; write some text")
        check_characters(f"prompt {number}", text)
    check_tokenizer(tokenizer)
    return from_ids([tokenizer(text)["input_ids"] for text in texts], bucket)
