"""DISCO's classifier: predicts whether the target will accept the next draft token (section 4).

A two-layer network reads the draft's distribution and the position of the token.
"""

from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from specjax.models.products import FULL_PRECISION

NUM_TOP = 10  # the largest probabilities, which the classifier reads (footnote 4)
NUM_FEATURES = NUM_TOP + 2  # plus entropy and position

PositionKind = Literal["draft", "generation"]  # where positions are counted from


class LengthClassifier(nn.Module):
    """Two layers: features `[..., 12]` of a draft token -> logit `[...]` that it is accepted.

    `sigmoid(logit)` is the paper's confidence C, which it compares with a threshold.
    """

    hidden_size: int = 64

    @nn.compact
    def __call__(self, features: Float[Array, "... 12"]) -> Float[Array, "..."]:
        hidden = nn.Dense(self.hidden_size, precision=FULL_PRECISION, name="hidden")(features)
        logit = nn.Dense(1, precision=FULL_PRECISION, name="logit")(nn.relu(hidden))
        return logit[..., 0]

    @nn.nowrap
    def run(self, params: Any, features: Float[Array, "... 12"]) -> Float[Array, "..."]:
        """Returns the logits; pure."""
        return jnp.asarray(self.apply({"params": params}, features))

    @nn.nowrap
    def initialise(self, key: Key[Array, ""]) -> dict[str, Any]:
        """Returns random params, float32."""
        return dict(self.init(key, jnp.zeros((NUM_FEATURES,)))["params"])


def features_of(probs: Float[Array, "B V"], position: Int[Array, " B"]) -> Float[Array, "B 12"]:
    """Returns the features of a draft token, float32.

    `probs` is the softmax of the draft's logits, without temperature and filters, as in training;
    positions count as `TrainedClassifier.position` names. The features are the ten largest
    probabilities in descending order (padded with zeros if V < 10), the entropy in nats, and
    `log(1 + position)`, which keeps far positions on the scale of the others.
    """
    return with_position(distribution_features(probs), position)


def distribution_features(probs: Float[Array, "... V"]) -> Float[Array, "... 11"]:
    """Returns the features other than the position: largest probabilities, then entropy."""
    probs = probs.astype(jnp.float32)
    count = min(NUM_TOP, probs.shape[-1])
    largest = jax.lax.top_k(probs, count)[0]
    missing = jnp.zeros((*probs.shape[:-1], NUM_TOP - count), jnp.float32)
    entropy = jnp.sum(jax.scipy.special.entr(probs), axis=-1, keepdims=True)
    return jnp.concatenate([largest, missing, entropy], axis=-1)


def with_position(
    features: Float[Array, "... 11"], position: Int[Array, "..."]
) -> Float[Array, "... 12"]:
    """Appends the position feature; positions count from 0."""
    scaled = jnp.log1p(position.astype(jnp.float32))
    return jnp.concatenate([features, scaled[..., None]], axis=-1)
