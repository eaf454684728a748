"""Generation from a prompt, at once or as a stream."""

from collections.abc import Iterable, Iterator

import numpy as np
from jaxtyping import Array, Int, Key

from specjax.core.errors import check_whole
from specjax.decoding.drafter import Drafter, Params
from specjax.decoding.engine import Engine
from specjax.decoding.prompt import Prompt
from specjax.decoding.request import check_key, end_tokens
from specjax.decoding.sampling import Sampling
from specjax.decoding.state import Generation, LoopState
from specjax.models.target import Target

ROUNDS_PER_CALL = 4  # between two looks at the text


def speculative_generate(
    params: Params,
    prompt: Prompt,
    key: Key[Array, "..."],
    *,
    target: Target,
    drafter: Drafter,
    sampling: Sampling = Sampling(),
    max_new_tokens: int = 256,
    eos: Iterable[int] | int | None = None,
    max_rounds: Int[Array, ""] | int | None = None,
) -> Generation:
    """Generates up to `max_new_tokens` per sequence: the tokens of plain decoding with this key.

    This holds under `coupled` verification, where sequence b of a batch also equals its prompt
    alone under `jax.random.fold_in(key, b)`. Under other rules the tokens may depend on the batch.

    One program is compiled per shape of prompt and static settings. A sequence whose logits become
    NaN or infinite ends early; `Generation.check` raises an error for it.

    Args:
        params: the weights of the target, and the data that the drafter reads.
        prompt: at least 2 tokens per sequence.
        key: decides the tokens above temperature 0; from `jax.random.key`, or an array of one key
            for each sequence. Wrap an old-style key with `jax.random.wrap_key_data`.
        target: the model; static, as are all further arguments but `max_rounds`.
        drafter: the method; under `coupled` verification it affects the speed alone.
        sampling: temperature, filters, and the verification rule.
        max_new_tokens: maximum number of new tokens per sequence.
        eos: token or tokens that end a sequence.
        max_rounds: stop after this many rounds, even before the end. It is not static, so a short
            warm-up run compiles the same program as a full one.

    Raises:
        SpecjaxError: if the request is invalid. Under an outer `jit` only shapes are checked.
    """
    engine = Engine(target, drafter, sampling, max_new_tokens, end_tokens(eos, target))
    return engine.generate(params, prompt, key, max_rounds)


def stream(
    params: Params,
    prompt: Prompt,
    key: Key[Array, "..."],
    *,
    target: Target,
    drafter: Drafter,
    sampling: Sampling = Sampling(),
    max_new_tokens: int = 256,
    eos: Iterable[int] | int | None = None,
    rounds_per_call: int = ROUNDS_PER_CALL,
) -> Iterator[Generation]:
    """Generates as `speculative_generate` does, yielding all new tokens so far every few rounds.

    Raises:
        SpecjaxError: at once if the request is invalid; later if logits are NaN or infinite.
    """
    check_whole("rounds_per_call", rounds_per_call, 1)
    engine = Engine(target, drafter, sampling, max_new_tokens, end_tokens(eos, target))
    engine.check(params, prompt)
    check_key(key, prompt.tokens.shape[0])
    state = engine.prefill(params, prompt, key)
    return (generation for generation, _ in stream_states(engine, params, state, rounds_per_call))


def stream_states(
    engine: Engine, params: Params, state: LoopState, rounds_per_call: int = ROUNDS_PER_CALL
) -> Iterator[tuple[Generation, LoopState]]:
    """Yields all new tokens so far and the state, which the next step donates."""
    is_done, max_rounds = False, 0
    while not is_done:
        max_rounds = min(max_rounds + rounds_per_call, engine.max_new_tokens)
        state = engine.run(params, state, max_rounds)
        generation, is_done = engine.generation(state), bool(np.asarray(state.is_done).all())
        generation.check()
        yield generation, state
