"""Validates requests before compilation, so errors are readable."""

import operator
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from specjax.core.errors import SpecjaxError, check_ids, check_type, check_whole
from specjax.core.memory import check_fits, device_bytes
from specjax.decoding.prompt import Prompt
from specjax.decoding.sampling import PerSequenceSampling, Sampling, SamplingValues
from specjax.models.attention import KEY_BLOCK
from specjax.models.config import TransformerConfig
from specjax.models.prefill import PREFILL_CHUNK
from specjax.models.sharding import shard_batch
from specjax.models.target import Target


def check_request(params: Any, prompt: Prompt, target: Target, max_new_tokens: int) -> None:
    """Validates the target's part of a request; under an outer `jit` only the shapes."""
    check_whole("max_new_tokens", max_new_tokens, 1)
    target.check(params)
    if not jnp.issubdtype(dtype := target.dtype(params), jnp.floating):
        raise SpecjaxError(f"the target's params are of dtype {dtype}; pass floats")
    _check_arrays(prompt)
    if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(prompt)):
        check_prompt(np.asarray(prompt.tokens), np.asarray(prompt.length), target.config)
        for length in sorted(set(np.asarray(prompt.length).tolist()), reverse=True):
            check_length(length, max_new_tokens, target.config)


def _check_arrays(prompt: Prompt) -> None:
    """Checks what every program of a request is compiled for, also under an outer `jit`."""
    parts: list[Any] = [prompt.tokens, prompt.length]
    shapes: list[tuple[int, ...]] = [getattr(part, "shape", ()) for part in parts]
    dtypes = [getattr(part, "dtype", None) for part in parts]
    is_batch = dtypes == [np.int32, np.int32] and [len(shape) for shape in shapes] == [2, 1]
    if not is_batch or shapes[0][0] != shapes[1][0] or 0 in shapes[0]:
        held = [f"{dtype}{list(shape)}" for dtype, shape in zip(dtypes, shapes, strict=True)]
        raise SpecjaxError(
            f"the prompt holds tokens {held[0]} and length {held[1]}, not int32 [B, P] and [B] "
            "with sequences in it; build it with specjax.from_ids"
        )


def check_memory(
    params: Any, shape: tuple[int, ...], pass_width: int, num_slots: int, target: Target
) -> None:
    """Raises SpecjaxError if a request certainly needs more memory than there is.

    `shape` is that of the padded prompt, `pass_width` counts the tokens of a pass per sequence.
    """
    batch, length = shape
    config, mesh = target.config, target.mesh
    cache = jax.eval_shape(partial(target.new_cache, params.target, batch, num_slots))
    scores = 4 * config.num_attention_heads * min(num_slots, KEY_BLOCK)  # of one token
    prefill = min(PREFILL_CHUNK, length) * scores
    verify = 4 * pass_width * config.vocab_size + pass_width**2  # logits and ancestors
    needs = {
        "weights": device_bytes(params),
        "cache": device_bytes(shard_batch(cache, mesh, batch)),
        "workspace": batch * max(prefill, verify) // (1 if mesh is None else mesh.size),
    }
    check_fits(f"a pass of {pass_width} tokens for {batch} sequence(s)", needs, params)


def check_key(key: Any, batch: int) -> None:
    """Raises SpecjaxError unless key is one `jax.random.key`, or one per sequence."""
    dtype = getattr(key, "dtype", None)
    is_key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not is_key or key.shape not in ((), (batch,)):
        raise SpecjaxError(
            f"key is of type {type(key).__name__}, an old-style key, or not one for each of "
            f"{batch} sequence(s); pass jax.random.key(0), or jax.random.wrap_key_data(key)"
        )


def check_values(
    sampling: Sampling, values: SamplingValues | None, batch: int, vocab_size: int
) -> None:
    """Raises SpecjaxError unless settings and values of `per_sequence` go together with a batch."""
    if values is not None and len(values.top_k) != batch:
        raise SpecjaxError(
            f"Params.sampling has values for {len(values.top_k)} sequences, the prompt has "
            f"{batch}; pass per_sequence one Sampling for each"
        )
    if values is not None and sampling.verification != "coupled":
        raise SpecjaxError(
            "Params.sampling needs coupled verification; pass the settings of per_sequence"
        )
    if (values is None) == isinstance(sampling, PerSequenceSampling):
        raise SpecjaxError(
            "Engine has the settings of per_sequence and Params.sampling not its values, or the "
            "reverse; pass both"
        )
    bias = values and values.logit_bias
    if bias is not None and bias.shape[1] != vocab_size:
        raise SpecjaxError(
            f"Params.sampling has biases for {bias.shape[1]} tokens, the target has {vocab_size}; "
            "pass that number to per_sequence"
        )


def check_processors(
    sampling: Sampling, arrays: tuple[Any, ...], config: TransformerConfig, eos: tuple[int, ...]
) -> None:
    """Validates all processors; `arrays` holds those of `sampling.processors`, or is empty."""
    if arrays and len(arrays) != len(sampling.processors):
        raise SpecjaxError(
            f"Params.processors has {len(arrays)} entries for {len(sampling.processors)} "
            "processors of Sampling; pass one for each, or None"
        )
    for processor, values in zip(*sampling.with_arrays(arrays), strict=True):
        processor.check(values, config.vocab_size, eos)


def end_tokens(eos: Any, target: Target) -> tuple[int, ...]:
    """Returns the distinct end tokens, sorted."""
    check_type("target", target, Target, "target.model, from specjax.load")
    try:
        given = eos.tolist() if hasattr(eos, "tolist") else eos
        tokens = () if given is None else given if isinstance(given, Iterable) else (given,)
        tokens = tuple(sorted({operator.index(token) for token in tokens}))
    except TypeError:
        raise SpecjaxError(f"eos {eos!r} does not hold token ids; pass target.eos") from None
    size = target.config.vocab_size
    if invalid := [token for token in tokens if not 0 <= token < size]:
        raise SpecjaxError(
            f"eos {invalid[0]} is outside the vocabulary of {size} (0 to {size - 1}); pass "
            "target.eos, or omit it to generate max_new_tokens"
        )
    return tokens


def check_prompt(tokens: np.ndarray, lengths: np.ndarray, config: TransformerConfig) -> None:
    """Raises SpecjaxError for prompts too short, wrongly padded, or outside the vocabulary."""
    for number, length in enumerate(lengths):
        if length < 2:
            raise SpecjaxError(
                f"prompt {number} has {length} token(s), but drafters need 2; prepend BOS or "
                "write a longer prompt"
            )
        if length > tokens.shape[1]:
            raise SpecjaxError(
                f"prompt {number} has length {length} but only {tokens.shape[1]} tokens; build it "
                "with specjax.from_ids"
            )
        check_ids(f"prompt {number}", tokens[number, :length], config.vocab_size)


def check_length(prompt_length: int, max_new_tokens: int, config: TransformerConfig) -> None:
    """Raises SpecjaxError if prompt and new tokens exceed the model's positions."""
    if prompt_length + max_new_tokens > config.longest_text:
        raise SpecjaxError(
            f"{prompt_length} prompt tokens + {max_new_tokens} new ones exceed the model's "
            f"{config.longest_text} positions (max_position_embeddings); generate at most "
            f"{max(config.longest_text - prompt_length, 0)} new tokens or shorten the prompt"
        )
    switch = config.rope.original_max_position_embeddings
    is_long = prompt_length + max_new_tokens > switch
    if config.rope.rope_type == "longrope" and prompt_length <= switch and is_long:
        raise SpecjaxError(
            f"{prompt_length} prompt tokens + {max_new_tokens} new ones exceed {switch} positions, "
            "where LongRoPE changes its table (original_max_position_embeddings); generate at most "
            f"{switch - prompt_length} new tokens, or pass a prompt longer than {switch}"
        )
