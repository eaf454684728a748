"""Plain decoding that computes the text anew for each token: slow, and short enough to trust."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.core.compilation import jit_loops
from specjax.core.errors import SpecjaxError, check_type
from specjax.decoding.processors import Nodes
from specjax.decoding.prompt import Prompt
from specjax.decoding.request import check_key, check_processors, check_request, end_tokens
from specjax.decoding.sampling import Draw, PerSequenceSampling, Sampling, sequence_keys
from specjax.decoding.tree import chain
from specjax.models.target import Target, causal_rows


def reference_generate(
    params: Any,
    prompt: Prompt,
    key: Key[Array, "..."],
    *,
    target: Target,
    sampling: Sampling = Sampling(),
    max_new_tokens: int = 256,
    eos: Iterable[int] | int | None = None,
    processor_params: tuple[Any, ...] = (),
) -> tuple[Int[Array, "B M"], Int[Array, " B"]]:
    """Generates the tokens that every method must produce; returns tokens and lengths.

    It runs the whole text through the target for every token, and applies the processors to it by
    their definition; filters and noise are those of the methods. `params` are the target's,
    `processor_params` those of `sampling.processors`; tokens beyond the length are 0.

    Raises:
        SpecjaxError: if the request is invalid.
    """
    eos = end_tokens(eos, target)
    check_type("sampling", sampling, Sampling, "specjax.Sampling(temperature=...)")
    if isinstance(sampling, PerSequenceSampling):
        raise SpecjaxError("the reference takes no settings of per_sequence; pass one Sampling")
    check_request(params, prompt, target, max_new_tokens)
    check_key(key, prompt.tokens.shape[0])
    check_processors(sampling, processor_params, target.config, eos)
    arrays = processor_params or (None,) * len(sampling.processors)
    return _generate(params, prompt, key, arrays, target, sampling, max_new_tokens, eos)


@partial(jit_loops, static_argnums=(4, 5, 6, 7))
def _generate(params, prompt, key, arrays, target, sampling, max_new_tokens, eos):
    batch, padded = prompt.tokens.shape
    num_slots = padded + max_new_tokens
    keys = sequence_keys(key, batch)

    def next_token(_, carry):
        tokens, length, is_done = carry
        rows = causal_rows(tokens, jnp.zeros((batch,), jnp.int32))
        cache = target.new_cache(params, batch, num_slots, prompt.length)
        output, _ = target.run(params, rows, cache)
        assert output.logits is not None
        last = jnp.take_along_axis(output.logits, length[:, None, None] - 1, axis=1)
        last = _processed(last[:, 0], tokens, length, prompt, sampling, eos, arrays)[:, None]
        scores = Draw(keys, length, sampling).perturbed(last, length[:, None])
        token = jnp.where(is_done, 0, jnp.argmax(scores[:, 0], axis=-1)).astype(jnp.int32)
        tokens = jax.vmap(lambda old, at, new: old.at[at].set(new))(tokens, length, token)
        is_done = is_done | jnp.isin(token, jnp.asarray(eos, jnp.int32))
        return tokens, jnp.where(carry[2], length, length + 1), is_done

    start = jnp.pad(prompt.tokens, ((0, 0), (0, max_new_tokens)))
    start = jnp.where(jnp.arange(num_slots)[None, :] < prompt.length[:, None], start, 0)
    carry = (start, prompt.length, jnp.zeros((batch,), bool))
    tokens, length, _ = lax.fori_loop(0, max_new_tokens, next_token, carry)
    at = prompt.length[:, None] + jnp.arange(max_new_tokens)[None, :]
    return jnp.take_along_axis(tokens, at, axis=1), length - prompt.length


def _processed(
    logits: Float[Array, "B V"],
    tokens: Int[Array, "B S"],
    length: Int[Array, " B"],
    prompt: Prompt,
    sampling: Sampling,
    eos: tuple[int, ...],
    arrays: tuple[Any, ...],
) -> Float[Array, "B V"]:
    """Applies all processors by their definitions to the logits after whole texts."""
    ids, places = jnp.arange(logits.shape[-1])[None, :], jnp.arange(tokens.shape[1])[None, :]
    logits = logits.astype(jnp.float32)

    def count(is_counted: Bool[Array, "B S"]) -> Int[Array, "B V"]:
        return jnp.sum((tokens[..., None] == ids[:, None]) & is_counted[..., None], axis=1)

    for token, bias in dict(sampling.logit_bias).items():
        logits = jnp.where(ids == token, logits + bias, logits)
    is_text, is_new = places < length[:, None], places >= prompt.length[:, None]
    if sampling.repetition_penalty != 1:
        penalty = sampling.repetition_penalty
        penalised = jnp.where(logits < 0, logits * penalty, logits / penalty)
        logits = jnp.where(count(is_text) > 0, penalised, logits)
    if sampling.presence_penalty or sampling.frequency_penalty:
        num_seen = count(is_text & is_new)
        logits = logits - sampling.presence_penalty * (num_seen > 0)
        logits = logits - sampling.frequency_penalty * num_seen
    for *before, last in sampling.bad_words:
        place = (length - len(before))[:, None] + jnp.arange(len(before))[None, :]
        same = jnp.take_along_axis(tokens, jnp.maximum(place, 0), axis=1) == jnp.int32(before)[None]
        is_next = jnp.all(same & (place >= 0), axis=1, keepdims=True)
        is_end = not before and last in eos
        logits = jnp.where(is_next & (ids == last) & (not is_end), -jnp.inf, logits)
    is_short = (length - prompt.length < sampling.min_new_tokens)[:, None]
    for token in eos:
        logits = jnp.where(is_short & (ids == token), -jnp.inf, logits)
    return _user_processors(logits, tokens, length, prompt, sampling, eos, arrays)


def _user_processors(logits, tokens, length, prompt, sampling, eos, arrays):
    """Applies `Sampling.processors`, their states computed anew from the prompt on."""
    num_new = length - prompt.length
    place = prompt.length[:, None] + jnp.arange(tokens.shape[1] - prompt.tokens.shape[1])[None]
    new_tokens = jnp.take_along_axis(tokens, place, axis=1)
    root = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)
    tree = chain(root[:, 0], root[:, :0], jnp.zeros_like(length))
    nodes = Nodes(tree, tokens, length, prompt.length, 0, eos)
    for processor, values in zip(sampling.processors, arrays, strict=True):
        state = processor.init(values, prompt, logits.shape[-1])
        state = processor.commit(values, state, new_tokens, num_new)
        logits = processor.apply(values, logits[:, None], state, nodes)[:, 0]
    return logits
