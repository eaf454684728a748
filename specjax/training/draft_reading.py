"""One teacher-forced pass over whole texts: what a draft would say behind every prefix of them."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.core.errors import SpecjaxError
from specjax.models.cache import KVCache
from specjax.models.heads.length_classifier import distribution_features
from specjax.models.target import Target, causal_rows

CHUNK = 128  # rows at a time: bounds the memory of logits; texts are padded to multiples of it
BATCH = 8  # texts at a time


class FrozenModel(NamedTuple):
    """A trained model that is only read. The fingerprint tells it from others."""

    model: Target
    params: Any
    fingerprint: str = ""


class Text(NamedTuple):
    """A prompt and how the target continues it, as token ids."""

    prompt: Sequence[int]
    continuation: Sequence[int]

    @property
    def length(self) -> int:
        """Tokens of both."""
        return len(self.prompt) + len(self.continuation)


class Reading(NamedTuple):
    """What the draft says at each token of a continuation, having read all before it. N tokens."""

    features: Any  # [N, 11], of its distribution
    choice: Any  # [N], its most likely token
    overlap: Any  # [N], 1 - total variation distance to the target's distribution, if that was run


def check_vocabularies(target: FrozenModel, draft: FrozenModel) -> None:
    """Raises SpecjaxError unless both models have vocabularies of one size."""
    sizes = [each.model.config.vocab_size for each in (target, draft)]
    if sizes[0] != sizes[1]:
        raise SpecjaxError(
            f"the draft has a vocabulary of {sizes[1]} tokens, the target one of {sizes[0]}; give "
            "a draft that shares the target's tokenizer"
        )


def read_texts(
    texts: Sequence[Text], draft: FrozenModel, target: FrozenModel | None
) -> Iterator[tuple[int, Reading]]:
    """The number of each text that has a continuation, with its reading; the shortest first.

    Without a target the overlap means nothing.
    """
    models = (draft.model,) if target is None else (draft.model, target.model)
    params = (draft.params,) if target is None else (draft.params, target.params)
    wanted = [number for number, text in enumerate(texts) if len(text.continuation)]
    wanted.sort(key=lambda number: texts[number].length)
    for start in range(0, len(wanted), BATCH):
        numbers = wanted[start : start + BATCH]
        tokens, lengths = _padded([texts[number] for number in numbers])
        seen = jax.tree.map(np.asarray, _read(params, tokens, lengths, models=models))
        for row, number in enumerate(numbers):
            first = len(texts[number].prompt) - 1  # the last prompt token's row tells the first new
            last = texts[number].length - 1
            yield number, Reading(*(part[row, first:last] for part in seen))


def _padded(texts: Sequence[Text]) -> tuple[Int[Array, "B T"], Int[Array, " B"]]:
    """Whole texts in rows, T a multiple of CHUNK; and their lengths. B is always BATCH."""
    longest = max(text.length for text in texts)
    tokens = np.zeros((BATCH, -(-longest // CHUNK) * CHUNK), np.int32)
    lengths = np.full(BATCH, longest, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : text.length] = [*text.prompt, *text.continuation]
        lengths[row] = text.length
    return jnp.asarray(tokens), jnp.asarray(lengths)


@partial(jax.jit, static_argnames="models")
def _read(
    params: tuple[Any, ...],
    tokens: Int[Array, "B T"],
    text_length: Int[Array, " B"],
    *,
    models: tuple[Target, ...],
) -> Reading:
    """Runs the draft, then the target if given, chunk by chunk; no logits outlive a chunk."""
    batch, length = tokens.shape
    caches = tuple(
        model.new_cache(own, batch, length, text_length)
        for model, own in zip(models, params, strict=True)
    )

    def read_chunk(caches, part):
        runs = [_probs(*each, part) for each in zip(models, params, caches, strict=True)]
        first, last = runs[0][0], runs[-1][0]
        seen = Reading(
            features=distribution_features(first),
            choice=jnp.argmax(first, axis=-1),
            overlap=jnp.sum(jnp.minimum(first, last), axis=-1),
        )
        return tuple(cache for _, cache in runs), seen

    chunks = tokens.reshape(batch, -1, CHUNK).swapaxes(0, 1)
    _, seen = jax.lax.scan(read_chunk, caches, chunks)
    return jax.tree.map(
        lambda part: part.swapaxes(0, 1).reshape(batch, length, *part.shape[3:]), seen
    )


def _probs(
    model: Target, params: Any, cache: KVCache, tokens: Int[Array, "B C"]
) -> tuple[Float[Array, "B C V"], KVCache]:
    output, cache = model.run(params, causal_rows(tokens, cache.length), cache)
    assert output.logits is not None
    probs = jax.nn.softmax(output.logits, axis=-1)
    return probs, cache.advance(jnp.full(tokens.shape[:1], tokens.shape[1]))
