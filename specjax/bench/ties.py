"""Detects near ties: places where 16-bit arithmetic may pick either of two tokens.

On GPUs and TPUs the last bits of a token's logits depend on how many tokens a pass computes. In
bfloat16 and float16 a method may therefore diverge from plain decoding's text, but only where two
tokens have almost the same logit. So it may on a CPU without native layers. In float32, and with
native layers, it must not.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from specjax.bench.measure import PLAIN
from specjax.bench.summary import TextMatch, TextPair, exactly
from specjax.core.text import num_equal
from specjax.decoding.prompt import Prompt, from_ids
from specjax.decoding.sampling import MIN_TEMPERATURE, Draw, Sampling, sequence_keys
from specjax.decoding.widths import padded_pass_width, run_padded
from specjax.loading.targets import LoadedTarget
from specjax.models.prefill import PREFILL_CHUNK, prefill
from specjax.models.quantize import compute_dtype
from specjax.models.target import Taps, causal_rows
from specjax.models.transformer import Transformer
from specjax.run.runner import trial_key

# The maximum difference of a near tie's logits, in units in the last place of the largest logit.
# Random models of 6 and 12 layers in bfloat16 never differed by more than 1.4.
EPSILON = 4


@dataclass(frozen=True, eq=False)
class NearTies:
    """Compares texts; in 16 bits it recognises those that diverge at a near tie.

    Where two texts diverge, it takes one step of plain decoding after their common prefix. It is a
    near tie if the scores of both tokens are within `EPSILON` of the best score. Above temperature
    0 scores include the noise of that position, in units of logits. If the key alone does not
    determine the text, only plain decoding is compared, with itself.
    """

    target: LoadedTarget
    sampling: Sampling
    seed: int

    def __call__(self, texts: TextPair) -> TextMatch:
        if texts.method != PLAIN and not self.sampling.is_reproducible:
            return TextMatch.NOT_COMPARED
        match = exactly(texts)
        dtype = compute_dtype(texts.dtypes[0])
        is_exact = jnp.finfo(dtype).bits > 16 or self.target.has_native_layers
        if match != TextMatch.DIFFERENT or is_exact:
            return match
        _, gap = self.divergence(texts)
        return TextMatch.NEAR_TIE if gap <= near_tie_in(dtype) else match

    def divergence(self, texts: TextPair) -> tuple[int, float]:
        """Returns the first new token at which two texts diverge, and the gap of their scores.

        The gap is the distance of the worse of their two tokens from the best, over the top logit;
        it is infinite if one text continues where the other ends.
        """
        at = num_equal(texts.tokens, texts.plain)
        if at == min(len(texts.tokens), len(texts.plain)):
            return at, math.inf
        differing = jnp.asarray([texts.tokens[at], texts.plain[at]])
        keys = sequence_keys(trial_key(self.seed, texts.trial), texts.batch_size)
        logits, scores = _next_token(
            self.target.params,
            from_ids([(*texts.ids, *texts.plain[:at])], bucket=PREFILL_CHUNK),
            keys[texts.sequence, None],
            jnp.asarray([len(texts.ids)]),
            target=self.target.model,
            sampling=self.sampling,
        )
        unit = 1 if self.sampling.is_greedy else max(self.sampling.temperature, MIN_TEMPERATURE)
        below = jnp.max(scores) - jnp.min(scores[differing])
        return at, float(below * unit / jnp.max(jnp.abs(logits)))


def near_tie_in(dtype: str) -> float:
    """Returns the maximum difference of a near tie's logits, as a share of the largest logit."""
    return EPSILON * float(jnp.finfo(compute_dtype(dtype)).eps)


@partial(jax.jit, static_argnames=("target", "sampling"))
def _next_token(
    params,
    text: Prompt,
    row_key: Key[Array, " B"],
    prompt_length: Int[Array, " B"],
    *,
    target: Transformer,
    sampling: Sampling,
) -> tuple[Float[Array, " V"], Float[Array, " V"]]:
    """Returns the next token's logits, and the scores whose argmax plain decoding takes."""
    before, num_slots = text.length - 1, text.tokens.shape[1] + padded_pass_width(target, 1)
    cache = target.new_cache(params, 1, num_slots, prompt_length)
    _, cache = prefill(params, text.tokens, before, cache, target, Taps())
    root = jnp.take_along_axis(text.tokens, before[:, None], axis=1)
    cache = replace(cache, length=before)
    output, _ = run_padded(target, params, causal_rows(root, before), cache, Taps())
    assert output.logits is not None
    draw = Draw(row_key, text.length, sampling)
    scores = draw.perturbed(output.logits, text.length[:, None])
    return output.logits[0, 0], scores[0, 0]
