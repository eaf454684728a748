"""Finds the attention heads of a target that copy (PLD+, section 4.2.1).

A prompt and the target's answer are run once more. Where the answer repeats a token of the
prompt, it was most likely copied from the occurrence with the longest matching context, and a head
that attends most to that position when the token is predicted is an induction head.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax.bench.measure import with_progress
from specjax.decoding.prompt import from_ids
from specjax.models.cache import KVCache
from specjax.models.config import TransformerConfig
from specjax.models.target import Taps, Target, causal_rows
from specjax.run.distillation import answers_of
from specjax.tuning.runs import Workload

CHUNK = 32  # tokens per pass: bounds the memory for the attention of all heads
BUCKET = 256  # texts share the programs of the next multiple


def answers(workload: Workload) -> list[tuple[list[int], int]]:
    """Returns each prompt followed by the target's greedy answer, and the prompt's length."""
    watch = partial(with_progress, doing="Generating answers")
    answer = answers_of(workload.target, workload.max_new_tokens, watch)
    pairs = zip(workload.prompts, answer(workload.prompts), strict=True)
    return [([*ids, *tokens], len(ids)) for ids, tokens in pairs]


def copy_sources(text: Sequence[int], prompt_length: int) -> list[tuple[int, int]]:
    """Returns (t, r) for every t whose token may be copied: r is the most likely source.

    Of the prompt's positions with the same token, r ends the longest run of equal tokens; among
    equals it is the last.
    """
    pairs = []
    for at in range(prompt_length, len(text)):
        candidates = [r for r in range(prompt_length) if text[r] == text[at]]
        if candidates:
            pairs.append((at, max(candidates, key=lambda r: (_agreement(text, r, at), r))))
    return pairs


def count_copies(
    texts: Iterable[tuple[Sequence[int], int]], target: Target, params: Any
) -> Int[np.ndarray, "L H"]:
    """Counts how often each head attended most to the source of a copied token.

    `texts` are pairs of tokens (prompt and answer) and the prompt's length.
    """
    config = target.config
    counts = np.zeros((config.num_hidden_layers, config.num_attention_heads), np.int64)
    for text, prompt_length in texts:
        pairs = copy_sources(text, prompt_length)
        if not pairs:
            continue
        at, source = np.array(pairs).T
        attended = most_attended(text, target, params)  # [L, H, T]
        counts += np.sum(attended[:, :, at - 1] == source, axis=2)
    return counts


def ranked(counts: Int[np.ndarray, "L H"]) -> tuple[tuple[int, int, int], ...]:
    """Returns (layer, head, times) of the heads that copied at all, the most frequent first."""
    heads = [(layer, head, int(times)) for (layer, head), times in np.ndenumerate(counts) if times]
    return tuple(sorted(heads, key=lambda copied: -copied[2]))


def most_attended(text: Sequence[int], target: Target, params: Any) -> Int[np.ndarray, "L H T"]:
    """Returns the position that each head attends to most, from every token of the text."""
    config = target.config
    tokens = from_ids([text], BUCKET).tokens
    cache = target.new_cache(params, 1, tokens.shape[1], prompt_length=len(text))
    parts = []
    for start in range(0, len(text), CHUNK):
        part, cache = _pass(params, tokens[:, start : start + CHUNK], cache, target)
        parts.append(np.asarray(part))
    positions = np.concatenate(parts, axis=1)[:, : len(text)]
    return positions.reshape(config.num_hidden_layers, config.num_attention_heads, -1)


@partial(jax.jit, static_argnames="target", donate_argnames="cache")
def _pass(
    params: Any, tokens: Int[Array, "1 Q"], cache: KVCache, target: Target
) -> tuple[Int[Array, "A Q"], KVCache]:
    taps = Taps(attention_heads=all_heads(target.config), logits=False)
    output, cache = target.run(params, causal_rows(tokens, cache.length), cache, taps)
    assert output.attention is not None
    return jnp.argmax(output.attention[0], axis=-1), cache.advance(jnp.full(1, tokens.shape[1]))


def all_heads(config: TransformerConfig) -> tuple[tuple[int, int], ...]:
    """Returns every (layer, head), layer by layer."""
    layers, heads = range(config.num_hidden_layers), range(config.num_attention_heads)
    return tuple((layer, head) for layer in layers for head in heads)


def _agreement(text: Sequence[int], first: int, second: int) -> int:
    """Counts the equal tokens that end at both positions."""
    count = 0
    while first - count >= 0 and text[first - count] == text[second - count]:
        count += 1
    return count
