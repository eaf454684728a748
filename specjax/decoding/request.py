"""Checks of a request before anything is compiled: one clear line, not a failure inside XLA."""

import operator
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from specjax.core.errors import SpecjaxError, check_at_least
from specjax.core.memory import check_fits, device_bytes
from specjax.decoding.prompt import Prompt
from specjax.models.attention import KEY_BLOCK
from specjax.models.config import TransformerConfig
from specjax.models.prefill import PREFILL_CHUNK
from specjax.models.sharding import constrain_rows
from specjax.models.target import Target


def check_request(params: Any, prompt: Prompt, target: Target, max_new_tokens: int) -> None:
    """Checks what concerns the target alone; `params` are its own.

    `max_new_tokens` must fit into the target's positions.
    """
    check_at_least("max_new_tokens", max_new_tokens, 1)
    target.check(params)
    rows, lengths = prompt.tokens.shape[0], prompt.length.shape[0]
    if rows != lengths:
        raise SpecjaxError(
            f"the prompt has {rows} row(s) of tokens but {lengths} length(s); build prompts with "
            "specjax.from_ids"
        )
    if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(prompt)):
        check_prompt(np.asarray(prompt.tokens), np.asarray(prompt.length), target.config)
        check_length(int(np.max(np.asarray(prompt.length))), max_new_tokens, target.config)


def check_memory(
    params: Any,
    shape: tuple[int, ...],
    rows: int,
    num_slots: int,
    target: Target,
    mesh: Mesh | None = None,
) -> None:
    """Raises SpecjaxError if a request certainly needs more memory than there is.

    Args:
        params: all that it reads.
        shape: of the prompt: rows, and tokens with their padding.
        rows: of a pass, for each row of the prompt.
        num_slots: of the cache.
        target: with its params, `params.target`.
        mesh: its devices; None: a single one.
    """
    batch, length = shape
    config = target.config
    cache = jax.eval_shape(partial(target.new_cache, params.target, batch, num_slots))
    scores = 4 * config.num_attention_heads * min(num_slots, KEY_BLOCK)  # of a row of the prompt
    prefill = min(PREFILL_CHUNK, length) * scores
    verify = 4 * rows * config.vocab_size + rows * rows  # logits and ancestors
    needs = {
        "weights": device_bytes(params),
        "cache": device_bytes(constrain_rows(cache, mesh, batch)),
        "workspace": batch * max(prefill, verify) // (1 if mesh is None else mesh.size),
    }
    check_fits(f"a round of {rows} rows for {batch} text(s)", needs, params)


def as_tuple(eos: Any, target: Target) -> tuple[int, ...]:
    """Returns the end tokens as they are compiled in: sorted, each once."""
    tokens = () if eos is None else eos if isinstance(eos, Iterable) else (eos,)
    try:
        tokens = tuple(sorted({operator.index(token) for token in tokens}))
    except TypeError:
        raise SpecjaxError(f"eos {eos!r} does not hold token ids; pass target.eos") from None
    size = target.config.vocab_size
    if outside := [token for token in tokens if not 0 <= token < size]:
        raise SpecjaxError(
            f"eos {outside[0]} is outside the vocabulary of {size} (0 to {size - 1}), so no text "
            "would end; pass target.eos, or nothing for texts of full length"
        )
    return tokens


def check_prompt(tokens: np.ndarray, lengths: np.ndarray, config: TransformerConfig) -> None:
    """Raises SpecjaxError for prompts too short, wrongly padded, or outside the vocabulary."""
    for row, length in enumerate(lengths):
        if length < 2:
            raise SpecjaxError(
                f"prompt {row} has {length} token(s): drafters need at least 2; prepend BOS or "
                "write a longer prompt"
            )
        if length > tokens.shape[1]:
            raise SpecjaxError(
                f"prompt {row} has length {length} but only {tokens.shape[1]} columns; build "
                "prompts with specjax.from_ids"
            )
        wrong = tokens[row, :length]
        wrong = wrong[(wrong < 0) | (wrong >= config.vocab_size)]
        if wrong.size:
            raise SpecjaxError(
                f"prompt {row} holds token id {wrong[0]}, outside the vocabulary of "
                f"{config.vocab_size} (0 to {config.vocab_size - 1}); tokenize it with the "
                "target's own tokenizer"
            )


def check_length(prompt_length: int, max_new_tokens: int, config: TransformerConfig) -> None:
    """Raises SpecjaxError if prompt and new tokens outgrow the model's positions."""
    if prompt_length + max_new_tokens > config.longest_text:
        raise SpecjaxError(
            f"{prompt_length} prompt tokens + {max_new_tokens} new ones exceed the model's "
            f"{config.longest_text} positions (max_position_embeddings); ask for at most "
            f"{max(config.longest_text - prompt_length, 0)} new tokens or shorten the prompt"
        )
    switch = config.rope.original_max_position_embeddings
    is_long = prompt_length + max_new_tokens > switch
    if config.rope.rope_type == "longrope" and prompt_length <= switch and is_long:
        raise SpecjaxError(
            f"{prompt_length} prompt tokens + {max_new_tokens} new ones pass {switch} positions, "
            "where LongRoPE changes its table (original_max_position_embeddings); ask for at most "
            f"{switch - prompt_length} new tokens, or give a prompt longer than {switch}"
        )
