"""Plain decoding without a reused cache, tree or drafter: slow, and short enough to trust."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Key

from specjax.core.compilation import jit_loops
from specjax.decoding.prompt import Prompt
from specjax.decoding.request import as_tuple, check_request
from specjax.decoding.sampling import Draw, Sampling, sequence_keys
from specjax.models.target import Target, causal_rows


def reference_generate(
    params: Any,
    prompt: Prompt,
    key: Key[Array, ""],
    *,
    target: Target,
    sampling: Sampling = Sampling(),
    max_new_tokens: int = 256,
    eos: Iterable[int] | int | None = None,
) -> tuple[Int[Array, "B M"], Int[Array, " B"]]:
    """Generates the tokens that every method must produce; returns tokens and lengths.

    It runs the whole text through the target for every token. `params` are the target's; tokens
    beyond the length are 0.

    Raises:
        SpecjaxError: if the request is invalid.
    """
    check_request(params, prompt, target, max_new_tokens)
    return _generate(params, prompt, key, target, sampling, max_new_tokens, as_tuple(eos, target))


@partial(jit_loops, static_argnums=(3, 4, 5, 6))
def _generate(params, prompt, key, target, sampling, max_new_tokens, eos):
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
