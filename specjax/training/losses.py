"""Losses of one slot: distances of a predicted feature or distribution from the target's.

They compute in float32, pass no gradient to the target's side, and leave the mean over slots to the
objective. The top losses are those of HASS (Zhang et al. 2025, section 3.1 and the ablations of
table 3); where the paper leaves a choice open, the function documents ours. The LK losses are per
slot, as in speculators. In all formulas p is the target's distribution and q the predicted one.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Int, Key, PyTree

from specjax.core.ranking import best_tokens

Metrics = Mapping[str, Array]  # scalars, or one number per depth of a draft
LossAndMetrics = tuple[Float[Array, ""], Metrics]
# Params, frozen params, batch and key -> loss and metrics.
LossFn = Callable[[PyTree, PyTree, PyTree, Key[Array, ""]], LossAndMetrics]

DistributionLoss = Literal["cross-entropy", "lk-lambda", "lk-alpha"]
KL_DECAY = 3.0  # of the divergence's share, per unit of overlap: as in the LK paper
MIN_OVERLAP = 1e-5  # below it, `lk-alpha` is constant

TopLoss = Literal[
    "top-k",
    "top-p",
    "normed-top-k-linear",
    "normed-top-k-softmax",
    "bidirectional-top-k",
    "recall-at-k",
    "bild",
]
DIFFERENCE_TEMPERATURE = 3.0  # of logits, as Li et al.


def smooth_l1(
    predicted: Float[Array, "... D"], target: Float[Array, "... D"]
) -> Float[Array, "..."]:
    """Averages the smooth L1 distance over D: half the square up to 1, linear beyond."""
    distance = optax.huber_loss(predicted.astype(jnp.float32), _constant(target))
    return jnp.mean(distance, axis=-1)


def soft_cross_entropy(
    logits: Float[Array, "... V"], target_logits: Float[Array, "... V"]
) -> Float[Array, "..."]:
    """Computes `-sum p log q` over the whole vocabulary."""
    probs = jax.nn.softmax(_constant(target_logits), axis=-1)
    return optax.softmax_cross_entropy(logits.astype(jnp.float32), probs)


def distribution_loss(
    kind: DistributionLoss,
    logits: Float[Array, "... R"],
    target_logits: Float[Array, "... V"],
    drafted: Int[Array, " R"] | None = None,
) -> Float[Array, "..."]:
    """Computes the cross-entropy, or an LK loss, which aims at acceptance.

    The overlap `sum min(p, q)` is the probability that rejection sampling accepts a token drawn
    from q. `lk-alpha` is its negative logarithm. `lk-lambda` is `s KL(p || q) + (1 - s)(1 -
    overlap)`, where s = `exp(-KL_DECAY overlap)` is a constant for gradients: the overlap has
    almost no gradient while it is small. With a draft vocabulary, `drafted`, the overlap takes p as
    it is, and the cross-entropy and KL take p given that the token can be drafted.
    """
    shared = target_logits if drafted is None else target_logits[..., drafted]
    if kind == "cross-entropy":
        return soft_cross_entropy(logits, shared)
    p = jax.nn.softmax(_constant(target_logits), axis=-1)
    q = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    overlap = jnp.sum(jnp.minimum(p if drafted is None else p[..., drafted], q), axis=-1)
    if kind == "lk-alpha":
        return -jnp.log(jnp.maximum(overlap, MIN_OVERLAP))
    entropy = soft_cross_entropy(_constant(shared), shared)
    share = jnp.exp(-KL_DECAY * lax.stop_gradient(overlap))
    divergence = soft_cross_entropy(logits, shared) - entropy
    return share * divergence + (1 - share) * (1 - overlap)


def top_loss(
    kind: str,
    logits: Float[Array, "... V"],
    target_logits: Float[Array, "... V"],
    k: int,
    p: float,
) -> Float[Array, "..."]:
    """Computes a loss on the target's k most likely tokens, or those that add up to p (`top-p`)."""
    k = min(k, logits.shape[-1])
    return TOP_LOSSES[kind](logits.astype(jnp.float32), _constant(target_logits), k, p)


# ---- The kinds: logits, target's logits, k, p -> loss --------------------------------------------


def _top_k(logits: Array, target_logits: Array, k: int, _p: float) -> Array:
    """Sums `-p log q` over p's k most likely tokens, without renormalising (HASS, equation 1)."""
    return _cross_entropy_at(_most_likely(target_logits, k), logits, target_logits)


def _top_p(logits: Array, target_logits: Array, _k: int, p: float) -> Array:
    """Does the same over the fewest of p's most likely tokens that reach the probability."""
    tokens = jnp.argsort(target_logits, axis=-1, descending=True)
    probs = _at(jax.nn.softmax(target_logits, axis=-1), tokens)
    before = jnp.cumsum(probs, axis=-1) - probs
    return _cross_entropy_at(tokens, logits, target_logits, before < p)


def _normed_top_k_linear(logits: Array, target_logits: Array, k: int, _p: float) -> Array:
    """Does as top-k, with p and q each divided by its sum over the set."""
    tokens = _most_likely(target_logits, k)
    # Dividing by the sum over the set is the softmax of the logits in the set.
    return soft_cross_entropy(_at(logits, tokens), _at(target_logits, tokens))


def _normed_top_k_softmax(logits: Array, target_logits: Array, k: int, _p: float) -> Array:
    """Does as top-k, with p and q each normalised by a softmax over the set.

    The softmax is of the probabilities: of the logits it would be the linear form, which the paper
    lists separately.
    """
    tokens = _most_likely(target_logits, k)
    q, p = (_at(jax.nn.softmax(values, axis=-1), tokens) for values in (logits, target_logits))
    return soft_cross_entropy(q, p)


def _bidirectional_top_k(logits: Array, target_logits: Array, k: int, _p: float) -> Array:
    """Does as top-k, over the union of p's and q's k most likely tokens."""
    p_tokens, q_tokens = _most_likely(target_logits, k), _most_likely(logits, k)
    is_shared = jnp.any(q_tokens[..., :, None] == p_tokens[..., None, :], axis=-1)
    of_q_only = _cross_entropy_at(q_tokens, logits, target_logits, ~is_shared)
    return of_q_only + _cross_entropy_at(p_tokens, logits, target_logits)


def _recall_at_k(logits: Array, target_logits: Array, k: int, _p: float) -> Array:
    """Returns 1 - the smoothed share of p's k most likely tokens that are among q's.

    Patel et al. 2022, "Recall@k Surrogate Loss with Large Batches and Similarity Mixup": a token's
    rank is 1 + the sum of `sigmoid(difference)` over all other tokens' logits, and it counts by
    `sigmoid(k - rank)`. Both have temperature 1; Patel et al. take 0.01 for the first, of cosines.
    Ranks are computed one at a time, so that no `[k, ..., V]` ever exists.
    """
    top_logits = _at(logits, _most_likely(target_logits, k))

    @jax.checkpoint
    def rank(logit: Array) -> Array:
        above = jax.nn.sigmoid(logits - logit[..., None])
        return jnp.sum(above, axis=-1) + 0.5  # its difference from itself has counted one half

    ranks = lax.map(rank, jnp.moveaxis(top_logits, -1, 0))
    return 1 - jnp.mean(jax.nn.sigmoid(k - ranks), axis=0)


def _bild(logits: Array, target_logits: Array, k: int, _p: float) -> Array:
    """Compares how p and q rank the k most likely tokens of p, and those of q.

    Li et al. 2024, "BiLD: Bi-directional Logits Difference Loss for Large Language Model
    Distillation": for each set, the divergence KL(p || q) of the softmax over the differences of
    the logits of its pairs, the likelier token first.
    """
    first, second = jnp.triu_indices(k, 1)

    def divergence(tokens: Int[Array, "... K"]) -> Array:
        log_p, log_q = (
            jax.nn.log_softmax((x[..., first] - x[..., second]) / DIFFERENCE_TEMPERATURE)
            for x in (_at(target_logits, tokens), _at(logits, tokens))
        )
        return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)

    return divergence(_most_likely(target_logits, k)) + divergence(_most_likely(logits, k))


TOP_LOSSES: dict[str, Callable[[Array, Array, int, float], Array]] = {
    "top-k": _top_k,
    "top-p": _top_p,
    "normed-top-k-linear": _normed_top_k_linear,
    "normed-top-k-softmax": _normed_top_k_softmax,
    "bidirectional-top-k": _bidirectional_top_k,
    "recall-at-k": _recall_at_k,
    "bild": _bild,
}


def _cross_entropy_at(
    tokens: Int[Array, "... K"], logits: Array, target_logits: Array, counts: Array | bool = True
) -> Array:
    """Computes `-sum p log q` over those of the tokens that count."""
    probs = jnp.where(counts, _at(jax.nn.softmax(target_logits, axis=-1), tokens), 0.0)
    return -jnp.sum(probs * _at(jax.nn.log_softmax(logits, axis=-1), tokens), axis=-1)


def _constant(values: Array) -> Array:
    return lax.stop_gradient(values).astype(jnp.float32)


def _most_likely(logits: Array, k: int) -> Int[Array, "... K"]:
    return best_tokens(lax.stop_gradient(logits), k)[1]


def _at(values: Array, tokens: Int[Array, "... K"]) -> Array:
    return jnp.take_along_axis(values, tokens, axis=-1)
