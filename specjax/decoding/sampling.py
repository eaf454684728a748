"""Sampling: the filters, and noise that depends on the position in the text.

Under `coupled` verification (the default) the token at absolute position t of a sequence is
`argmax(filtered logits + gumbel(fold_in(sequence_key, t)))`, so the generated tokens depend on the
key alone, never on the drafter. `rejection` must not reuse noise that affected an earlier decision,
so its noise also depends on the round. `typical` draws as `coupled` does, but accepts any drafted
token that is typical: it is LOSSY.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.core.pytree import pytree, static
from specjax.core.ranking import best_tokens
from specjax.core.settings import SettingError, check_fields, setting
from specjax.decoding.processors import (
    BadWords,
    Controls,
    LogitBias,
    MinNewTokens,
    Penalties,
    Processor,
)
from specjax.decoding.tree import DraftTree

# Streams of `rejection` noise: for the drafter, for acceptance, for the bonus.
DRAFT, ACCEPT, BONUS = 0, 1, 2
# Within these a temperature and its reciprocal are normal numbers of float32, in which a scale of 0
# would turn -inf into NaN.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e37
MIN_TOP_P = 1e-30  # smaller values underflow; keep the most likely token only
MAX_BIAS = 1e30  # far from where float32 ends
LOSSY = "LOSSY: typical acceptance lets the drafter influence the text; it is not the target's own"


@pytree
class SamplingValues:
    """The numbers of `Sampling` for the sequences of a batch; from `per_sequence`."""

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]  # 0 keeps all tokens
    top_p: Float[Array, " B"]
    log_min_p: Float[Array, " B"]  # -inf keeps all tokens
    repetition_penalty: Float[Array, " B"]
    presence_penalty: Float[Array, " B"]
    frequency_penalty: Float[Array, " B"]
    min_new_tokens: Int[Array, " B"]
    logit_bias: Float[Array, "B V"] | None


@dataclass(frozen=True)
class Sampling:
    """Static settings: how the target's tokens are drawn, and which drafted ones are accepted.

    The logits pass, in this order: `logit_bias`; the penalties for repetition, presence and
    frequency; `bad_words`; `min_new_tokens`; `processors`; and above temperature 0 temperature,
    `top_k`, `top_p`, `min_p`.

    Under `typical` verification a drafted token is accepted if its probability exceeds
    min(`typical_epsilon`, `typical_delta` exp(-entropy)) (Medusa, section 2.3.1).
    """

    temperature: float = setting(0.0, at_least=0, advice="0 means greedy")
    top_k: int | None = setting(None, at_least=1, advice="omit it to keep all tokens")
    top_p: float = setting(1.0, above=0, at_most=1, advice="1 keeps all tokens")
    verification: Literal["coupled", "rejection", "typical"] = "coupled"
    typical_epsilon: float = setting(0.09, at_least=0, at_most=1)
    typical_delta: float = setting(0.3, at_least=0, at_most=1)
    min_p: float = setting(0.0, at_least=0, at_most=1, advice="0 keeps all tokens")
    repetition_penalty: float = setting(
        1.0, at_least=0.001, at_most=1000, advice="1 changes nothing"
    )
    presence_penalty: float = setting(0.0, at_least=-2, at_most=2)
    frequency_penalty: float = setting(0.0, at_least=-2, at_most=2)
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    """Numbers to add to the logits of token ids."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that must not appear."""
    min_new_tokens: int = setting(0, at_least=0)
    """New tokens before an end token may come."""
    processors: tuple[Processor, ...] = ()
    """Further processors; their arrays are `Params.processors`."""
    logprobs: int | None = setting(None, at_least=0, at_most=20, advice="omit it to record none")
    """Record log-probabilities of new tokens and of this many of the most likely ones."""

    def __post_init__(self):
        check_fields(self)
        # Hashable, and sorted, so that equal biases share a program.
        biases = dict(self.logit_bias)
        object.__setattr__(self, "logit_bias", tuple(sorted(biases.items())))
        if not all(abs(x) <= MAX_BIAS or x == -jnp.inf for x in biases.values()):
            problem = f"must hold numbers from {-MAX_BIAS:g} to {MAX_BIAS:g}, or -inf for a ban"
            raise SettingError("logit_bias", problem)
        if () in self.bad_words:
            raise SettingError("bad_words", "holds an empty sequence; pass the ids of words")

    @property
    def all_processors(self) -> tuple[Processor, ...]:
        """The processors that the settings switch on, in their order, then `processors`."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        switched_on = (
            LogitBias(tuple(dict(self.logit_bias).items())) if self.logit_bias else None,
            Penalties(*penalties) if penalties != (1, 0, 0) else None,
            BadWords(self.bad_words) if self.bad_words else None,
            MinNewTokens(self.min_new_tokens) if self.min_new_tokens else None,
        )
        return (*filter(None, switched_on), *self.processors)

    def with_arrays(
        self, arrays: Sequence[Any], values: Any = None
    ) -> tuple[tuple[Processor, ...], tuple[Any, ...]]:
        """Returns all processors, and what each reads: `values`, or its own of `arrays`."""
        processors, given = self.all_processors, arrays or (None,) * len(self.processors)
        return processors, (values,) * (len(processors) - len(given)) + tuple(given)

    @property
    def for_prefill(self) -> "Sampling":
        """The part that prefill depends on, so that the other settings share its program.

        Processors without a state only keep their places.
        """
        has_state = lambda one: type(one).init is not Processor.init  # noqa: E731
        parts = (one if has_state(one) else LogitBias(()) for one in self.all_processors)
        return Sampling(processors=tuple(parts), logprobs=self.logprobs)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_reproducible(self) -> bool:
        """Whether the key alone decides the tokens, whatever the drafter."""
        return self.is_greedy or self.verification == "coupled"

    @property
    def is_lossy(self) -> bool:
        """Whether even the distribution of the tokens may differ from plain decoding's."""
        return self.verification == "typical" and not self.is_greedy

    @property
    def needs_draft_probs(self) -> bool:
        """Whether verification uses the distributions that tokens were drafted from, if any."""
        return self.verification == "rejection" and not self.is_greedy

    @property
    def noise_is_known(self) -> bool:
        """Whether drafters may use the noise that decides the target's tokens.

        `rejection` forbids it, and `typical` accepts by probabilities, not by draws.
        """
        return self.verification == "coupled" and not self.is_greedy

    def filtered(
        self, logits: Float[Array, "... V"], values: SamplingValues | None = None
    ) -> Float[Array, "... V"]:
        """Returns float32 log-probabilities after temperature and filters; -inf where cut.

        Top-k keeps the k most likely tokens, top-p the smallest set of most likely tokens that
        reaches `top_p`, and both any that tie with the last one. Min-p keeps tokens at least
        `min_p` times as likely as the most likely one. Greedy decoding skips the filters. `values`
        replace the numbers of filters that are on; each sequence can switch any of them off.
        """
        logits = logits.astype(jnp.float32)
        if self.is_greedy:
            return jax.nn.log_softmax(logits, axis=-1)
        # XLA multiplies by the reciprocal of a constant; values of sequences must round equally.
        temperature = np.clip(self.temperature, MIN_TEMPERATURE, MAX_TEMPERATURE)
        scale = np.float32(1) / np.float32(temperature)
        top_p = max(self.top_p, MIN_TOP_P)
        log_min_p = math.log(self.min_p) if self.min_p else -math.inf
        unfiltered = logits
        if values is not None:
            beside = len(values.top_k), *[1] * (logits.ndim - 1)
            temperature = jnp.clip(values.temperature, MIN_TEMPERATURE, MAX_TEMPERATURE)
            scale = 1 / temperature.reshape(beside)
            top_p = jnp.maximum(values.top_p, MIN_TOP_P).reshape(beside)
            log_min_p, top_k = values.log_min_p.reshape(beside), values.top_k.reshape(beside)

        def cut(log_probs: Array, is_kept: Array, is_on: Any) -> Array:
            kept = jax.nn.log_softmax(jnp.where(is_kept, log_probs, -jnp.inf), axis=-1)
            return kept if values is None else jnp.where(is_on, kept, log_probs)

        # From the maximum down, so that a tiny temperature overflows to -inf, never to NaN.
        logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) * scale
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            best = best_tokens(logits, self.top_k)[0]
            threshold = best[..., -1:]
            if values is not None:
                threshold = jnp.take_along_axis(best, jnp.maximum(top_k, 1) - 1, axis=-1)
                threshold = jnp.where(top_k > 0, threshold, -jnp.inf)
            logits = jnp.where(logits >= threshold, logits, -jnp.inf)
        log_probs = jax.nn.log_softmax(logits, axis=-1)
        if self.top_p < 1:
            log_probs = cut(log_probs, _top_p_mask(log_probs, top_p), top_p < 1)
        if self.min_p > 0:
            least = jnp.max(log_probs, axis=-1, keepdims=True) + log_min_p
            log_probs = cut(log_probs, log_probs >= least, log_min_p > -jnp.inf)
        if values is None:
            return log_probs
        is_greedy = (values.temperature == 0).reshape(beside)
        return jnp.where(is_greedy, jax.nn.log_softmax(unfiltered, axis=-1), log_probs)


@dataclass(frozen=True)
class PerSequenceSampling(Sampling):
    """Settings from `per_sequence`, whose numbers only switch on what `SamplingValues` holds."""


def _top_p_mask(
    log_probs: Float[Array, "... V"], top_p: float | Float[Array, "..."]
) -> Bool[Array, "... V"]:
    """Whether a token is needed to reach `top_p`: all that are more likely sum to less.

    The threshold is found bit by bit, without sorting the vocabulary.
    """
    # The bits of non-negative floats, read as integers, have the same order.
    rank = lax.bitcast_convert_type(jnp.maximum(-log_probs, 0.0), jnp.int32)
    probs = jnp.exp(log_probs)

    def add_bit(number: Int[Array, ""], limit: Int[Array, "... 1"]) -> Int[Array, "... 1"]:
        higher = limit | (1 << (30 - number))
        above = jnp.sum(jnp.where(rank < higher, probs, 0.0), axis=-1, keepdims=True)
        return jnp.where(above < top_p, higher, limit)

    return rank <= lax.fori_loop(0, 31, add_bit, jnp.zeros_like(rank[..., :1]))


@pytree
class Draw:
    """The settings and the random draws of one round, shared by the drafter and the verifier.

    With a draft vocabulary, draws are restricted to its R tokens: so are logits, noise and ranks.
    """

    sequence_keys: Key[Array, " B"]
    round_start: Int[Array, " B"]  # committed length at the start of the round
    sampling: Sampling = static()
    draft_vocab: Int[Array, " R"] | None = None  # None: all tokens
    vocab_size: int = static(default=0)  # of the target; 0 without a draft vocabulary
    controls: Controls | None = None  # None: the logits are used as they are
    values: SamplingValues | None = None  # None: `sampling` holds for all sequences

    @property
    def temperature(self) -> float | Float[Array, "B 1 1"]:
        """The temperature of the batch, or of its sequences."""
        if self.values is None:
            return self.sampling.temperature
        return self.values.temperature[:, None, None]

    def processed(
        self, logits: Float[Array, "B N V"], tree: DraftTree, max_depth: int
    ) -> Float[Array, "B N V"]:
        """Returns the target's logits after each node as the processors change them."""
        return logits if self.controls is None else self.controls.apply(logits, tree, max_depth)

    def restricted_to(self, draft_vocab: Int[Array, " R"], vocab_size: int) -> "Draw":
        """Returns the draws restricted to some tokens of a vocabulary."""
        return replace(self, draft_vocab=draft_vocab, vocab_size=vocab_size)

    def tokens(self, ranked: Int[Array, "..."]) -> Int[Array, "..."]:
        """Returns the token ids for these indices of the logits."""
        return ranked if self.draft_vocab is None else self.draft_vocab[ranked]

    def over_vocabulary(self, probs: Float[Array, "... R"]) -> Float[Array, "... V"]:
        """Returns the probabilities of the whole vocabulary; 0 outside the draft vocabulary."""
        if self.draft_vocab is None:
            return probs
        zeros = jnp.zeros((*probs.shape[:-1], self.vocab_size), probs.dtype)
        return zeros.at[..., self.draft_vocab].set(probs)

    def filtered(self, logits: Float[Array, "... V"]) -> Float[Array, "... V"]:
        """Returns the log-probabilities that tokens are drawn from; see `Sampling.filtered`."""
        return self.sampling.filtered(logits, self.values)

    def noise(
        self, positions: Int[Array, "B N"], vocab_size: int, stream: int = DRAFT
    ) -> Float[Array, "B N V"]:
        """Returns Gumbel noise for the tokens that will stand at `positions` of the text."""
        keys, size = self._position_keys(positions, stream), self.vocab_size or vocab_size
        noise = jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (size,), jnp.float32)))(keys)
        return noise if self.draft_vocab is None else noise[..., self.draft_vocab]

    def uniform(
        self, positions: Int[Array, "B N"], count: int, stream: int = ACCEPT
    ) -> Float[Array, "B N C"]:
        """Returns `count` uniform numbers in [0, 1) for each of `positions`."""
        keys = self._position_keys(positions, stream)
        return jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (count,), jnp.float32)))(keys)

    def perturbed(
        self,
        logits: Float[Array, "B N V"],
        positions: Int[Array, "B P"],
        place: Int[Array, "B N"] | None = None,
    ) -> Float[Array, "B N V"]:
        """Returns scores whose argmax is a draw from the filtered logits; greedy: the logits.

        The k best scores are k draws without replacement, in order. Node n draws with the noise of
        position `place[b, n]` of `positions`, by default with that of position n.
        """
        if self.sampling.is_greedy:
            return logits.astype(jnp.float32)
        log_probs, noise = self.filtered(logits), self.noise(positions, logits.shape[-1])
        if place is not None:
            noise = jax.vmap(lambda noise, at: noise[at])(noise, place)
        scores = log_probs + noise
        return scores if self.values is None else jnp.where(self.temperature == 0, logits, scores)

    def _position_keys(self, positions: Int[Array, "B N"], stream: int) -> Key[Array, "B N"]:
        def of_sequence(key, start, positions):
            if self.sampling.verification == "rejection":
                key = jax.random.fold_in(jax.random.fold_in(key, stream), start)
            return jax.vmap(lambda position: jax.random.fold_in(key, position))(positions)

        return jax.vmap(of_sequence)(self.sequence_keys, self.round_start, positions)


def sequence_keys(key: Key[Array, "..."], batch: int) -> Key[Array, " B"]:
    """Returns a key per sequence: `fold_in(key, b)`, but the key itself for a batch of one.

    Sequence b of a batch therefore equals its prompt run alone with `fold_in(key, b)`; with an
    array of keys, one per sequence, it equals its prompt alone with `key[b]`. Keys of other kinds
    become Threefry's, since theirs draw other numbers under `vmap`.
    """
    if key.ndim:
        return lax.map(_as_threefry, key)
    if batch == 1:
        return _as_threefry(key)[None]
    fold_in = lambda number: _as_threefry(jax.random.fold_in(key, number))  # noqa: E731
    return lax.map(fold_in, jnp.arange(batch))


def _as_threefry(key: Key[Array, ""]) -> Key[Array, ""]:
    data = jax.random.key_data(key)
    key = jax.random.wrap_key_data(data[:2], impl="threefry2x32")
    for word in data[2:]:
        key = jax.random.fold_in(key, word)
    return key
