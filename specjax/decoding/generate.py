"""The loop: prefill once, then rounds until all rows are done, all in one compiled program.

`tokens[:length]` is committed. The last of them, the root, is not in the target's cache, which
holds `length - 1` rows. A round feeds the root and the draft, keeps one path, and the bonus becomes
the next root. Prefill caches the prompt without its last token, so the first round is like any
other.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Key

from specjax.core.errors import SpecjaxError
from specjax.decoding.drafter import Drafter, Params
from specjax.decoding.prompt import Prompt
from specjax.decoding.request import as_tuple, check_request
from specjax.decoding.round import one_round
from specjax.decoding.sampling import Sampling, row_keys
from specjax.decoding.state import NO_SOURCE, Generation, LoopState, Stats
from specjax.models.cache import KVCache
from specjax.models.prefill import prefill, whole_chunks
from specjax.models.transformer import Transformer

STATIC = ("target", "drafter", "sampling", "max_new_tokens", "eos")


def speculative_generate(
    params: Params,
    prompt: Prompt,
    key: Key[Array, ""],
    *,
    target: Transformer,
    drafter: Drafter,
    sampling: Sampling = Sampling(),
    max_new_tokens: int = 256,
    eos: Iterable[int] | int | None = None,
    max_rounds: Int[Array, ""] | int | None = None,
) -> Generation:
    """Generates up to `max_new_tokens` per row, saying what plain decoding with `key` would say.

    So it is under `coupled` verification; see `Sampling` for the others. Under it also row b of a
    batch equals its prompt alone under `jax.random.fold_in(key, b)`; under the others a drafter
    that looks at the whole batch, as `auto` does, may change which tokens are drawn.

    One compiled program per shape of prompt and static settings.

    Args:
        params: the target's weights and whatever the drafter reads.
        prompt: at least 2 tokens per row.
        key: decides the text above temperature 0.
        target: the model; static, as are all that follow but the last.
        drafter: the method; it decides the speed, not the text.
        sampling: temperature, filters, and the way of verification.
        max_new_tokens: new tokens per row at most.
        eos: token or tokens that end a row.
        max_rounds: stop after so many rounds, even in the middle of the text. Not static: a short
            run compiles, and warms up, what a whole one then uses.

    Raises:
        SpecjaxError: for a request that cannot be served; values are checked where they are
            concrete, that is outside an outer `jit`.
    """
    check_request(params, prompt, target, drafter, max_new_tokens)
    return _generate(
        params,
        prompt,
        key,
        max_new_tokens if max_rounds is None else max_rounds,  # a round adds a token or more
        target=target,
        drafter=drafter,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        eos=as_tuple(eos),
    )


def stream(
    params: Params,
    prompt: Prompt,
    key: Key[Array, ""],
    *,
    target: Transformer,
    drafter: Drafter,
    sampling: Sampling = Sampling(),
    max_new_tokens: int = 256,
    eos: Iterable[int] | int | None = None,
    rounds_per_call: int = 4,
) -> Iterator[Generation]:
    """As `speculative_generate`, but yields the text so far after every `rounds_per_call` rounds.

    Raises:
        SpecjaxError: at once, for a request that cannot be served or fewer than 1 round per call.
    """
    if rounds_per_call < 1:
        raise SpecjaxError(f"rounds_per_call {rounds_per_call} must be at least 1")
    check_request(params, prompt, target, drafter, max_new_tokens)
    settings = {"target": target, "drafter": drafter, "max_new_tokens": max_new_tokens}
    state = start_loop(params, prompt, key, **settings)
    settings |= {"sampling": sampling, "eos": as_tuple(eos)}
    return _parts(params, state, rounds_per_call, settings)


def _parts(
    params: Params, state: LoopState, rounds_per_call: int, settings: dict[str, Any]
) -> Iterator[Generation]:
    is_done, max_rounds = False, 0
    while not is_done:
        max_rounds += rounds_per_call
        state, generation = finish_loop(params, state, max_rounds, **settings)
        is_done = bool(jnp.all(state.is_done))
        yield generation


@partial(jax.jit, static_argnames=STATIC)
def _generate(
    params, prompt, key, max_rounds, *, target, drafter, sampling, max_new_tokens, eos
) -> Generation:
    settings = {"target": target, "drafter": drafter, "max_new_tokens": max_new_tokens}
    state = start_loop(params, prompt, key, **settings)
    _, generation = finish_loop(params, state, max_rounds, sampling=sampling, eos=eos, **settings)
    return generation


@partial(jax.jit, static_argnames=STATIC, donate_argnames="state")
def finish_loop(
    params: Params,
    state: LoopState,
    max_rounds: Int[Array, ""] | int,
    *,
    target: Transformer,
    drafter: Drafter,
    sampling: Sampling,
    max_new_tokens: int,
    eos: tuple[int, ...],
) -> tuple[LoopState, Generation]:
    """Rounds until all rows are done, or `max_rounds` were run since `start_loop`.

    After `start_loop` the same as `speculative_generate`, for those who want to time, or to place,
    the two parts apart; and again with more `max_rounds`, to see the text grow. The state is
    donated, and comes back in the same memory.
    """
    state = lax.while_loop(
        lambda state: ~jnp.all(state.is_done) & (jnp.max(state.stats.rounds) < max_rounds),
        lambda state: one_round(params, state, target, drafter, sampling, max_new_tokens, eos),
        state,
    )
    return state, state.generation(max_new_tokens)


@partial(jax.jit, static_argnames=("target", "drafter", "max_new_tokens"))
def start_loop(
    params: Params,
    prompt: Prompt,
    key: Key[Array, ""],
    *,
    target: Transformer,
    drafter: Drafter,
    max_new_tokens: int,
) -> LoopState:
    """Prefills the prompt without its last token and lets the drafter prepare."""
    batch, prompt_length = prompt.tokens.shape
    padded = whole_chunks(prompt_length)
    tokens = jnp.pad(prompt.tokens, ((0, 0), (0, padded - prompt_length)))
    slots = num_slots(prompt_length, max_new_tokens, drafter)
    cache = KVCache.create(
        target.config,
        batch,
        slots,
        params.target["embed_tokens"]["weight"].dtype,
        text_length=prompt.length + max_new_tokens,
    )
    prefilled, cache = prefill(
        params.target, tokens, prompt.length - 1, cache, target, drafter.taps
    )
    cache = replace(cache, length=prompt.length - 1)
    count = max_new_tokens + drafter.max_depth + 1
    return LoopState(
        tokens=jnp.pad(tokens, ((0, 0), (0, count))),
        from_draft=jnp.zeros((batch, padded + count), bool),
        source=jnp.full((batch, padded + count), NO_SOURCE),
        length=prompt.length,
        prompt_length=prompt.length,
        is_done=jnp.zeros((batch,), bool),
        row_keys=row_keys(key, batch),
        cache=cache,
        drafter=drafter.init(params, prompt, prefilled, slots),
        stats=Stats(
            rounds=jnp.zeros((batch,), jnp.int32),
            drafted=jnp.zeros((batch,), jnp.int32),
            accepted_lengths=jnp.zeros((batch, drafter.max_depth + 2), jnp.int32),
        ),
    )


def num_slots(prompt_length: int, max_new_tokens: int, drafter: Drafter) -> int:
    """Slots that the KV cache of a request has per row; `prompt_length` counts the padding."""
    # A finished row still writes a round's rows behind its text.
    rows_of_a_round = drafter.num_nodes + drafter.num_probes
    return whole_chunks(prompt_length) + max_new_tokens + rows_of_a_round
