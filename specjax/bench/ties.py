"""Near ties: where 16-bit arithmetic may say either of two tokens, and neither is wrong.

The logits of a row depend in their last bits on how many rows are computed together. So in bfloat16
and float16 a method may leave plain decoding's text, but only at a place where the two tokens all
but tie. In float32 it never may.
"""

from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from specjax.bench.measure import PLAIN
from specjax.bench.summary import Said, Verdict, exactly
from specjax.decoding.prompt import Prompt, from_ids
from specjax.decoding.sampling import LEAST_TEMPERATURE, Draw, Sampling, row_keys
from specjax.hub import LoadedTarget
from specjax.models.prefill import PREFILL_CHUNK, prefill
from specjax.models.target import Taps, causal_rows
from specjax.models.transformer import Transformer

# Units in the last place of the largest logit that the logits of a near tie are apart, at most.
# Where random models of 6 and 12 layers parted in bfloat16 it was never more than 1.4.
EPSILON = 4


@dataclass(frozen=True, eq=False)
class NearTies:
    """A judge that forgives, in 16-bit dtypes, texts that part at a near tie.

    Where they part, one step of plain decoding is taken over their common beginning. It is a near
    tie if the scores of both tokens lie within `EPSILON` of the best score. Above temperature 0
    scores include the noise of the place, and are counted in units of logits. Where the key alone
    does not decide the text, only plain decoding is compared, with itself.
    """

    target: LoadedTarget
    sampling: Sampling
    seed: int
    max_new_tokens: int

    def __call__(self, said: Said) -> Verdict:
        if said.method != PLAIN and not self.sampling.is_reproducible:
            return Verdict.NOT_COMPARED
        verdict = exactly(said)
        dtype = said.dtypes[0]
        if verdict != Verdict.DIFFERENT or jnp.finfo(dtype).bits > 16:
            return verdict
        pairs = list(zip(said.own, said.plain, strict=False))
        at = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if at == len(pairs):  # one text goes on where the other ends
            return verdict
        text = (*said.ids, *said.plain[:at])
        gap = self._gap(text, pairs[at], said.row, len(said.ids) + self.max_new_tokens)
        return Verdict.NEAR_TIE if gap <= near_tie_in(dtype) else verdict

    def _gap(
        self, text: tuple[int, ...], tokens: tuple[int, int], row: int, text_length: int
    ) -> float:
        """How far the worse of two next tokens lies below the best, over the largest logit."""
        logits, scores = _next_token(
            self.target.params,
            from_ids([text], bucket=PREFILL_CHUNK),
            row_keys(jax.random.key(self.seed), row + 1)[row:],
            jnp.asarray([text_length]),
            target=self.target.model,
            sampling=self.sampling,
        )
        unit = 1 if self.sampling.is_greedy else max(self.sampling.temperature, LEAST_TEMPERATURE)
        below = jnp.max(scores) - jnp.min(scores[jnp.asarray(tokens)])
        return float(below * unit / jnp.max(jnp.abs(logits)))


def near_tie_in(dtype: str) -> float:
    """How far apart the logits of a near tie may be, as a share of the largest logit."""
    return EPSILON * float(jnp.finfo(dtype).eps)


@partial(jax.jit, static_argnames=("target", "sampling"))
def _next_token(
    params,
    prompt: Prompt,
    row_key: Key[Array, " B"],
    text_length: Int[Array, " B"],
    *,
    target: Transformer,
    sampling: Sampling,
) -> tuple[Float[Array, " V"], Float[Array, " V"]]:
    """Logits, and scores whose argmax plain decoding says, after a prompt of whole chunks."""
    before = prompt.length - 1
    cache = target.new_cache(params, 1, prompt.tokens.shape[1] + 1, text_length)
    _, cache = prefill(params, prompt.tokens, before, cache, target, Taps())
    root = jnp.take_along_axis(prompt.tokens, before[:, None], axis=1)
    output, _ = target.run(params, causal_rows(root, before), replace(cache, length=before))
    assert output.logits is not None
    draw = Draw(row_key, prompt.length, sampling)
    scores = draw.perturbed(output.logits, prompt.length[:, None])
    return output.logits[0, 0], scores[0, 0]
