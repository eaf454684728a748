"""The base class of all trainings of heads, and the step that their losses read."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key, PyTree

from specjax.models.config import TransformerConfig
from specjax.models.fingerprint import fingerprint
from specjax.models.heads.training_attention import text_before
from specjax.models.target import QueryRows, Taps, Target
from specjax.training.data import slot_mask
from specjax.training.losses import (
    LossAndMetrics,
    LossFn,
    TopLoss,
    check_top_loss,
    soft_cross_entropy,
    top_loss,
)
from specjax.training.optimizer import OptimizerOptions
from specjax.training.ranges import check_not_negative

# Slots of each row whose logits exist at a time when they are recomputed: with a vocabulary of 128k
# and 8 rows such an array is 1 GB (8 GB for 2048 slots), and each read of the LM head still serves
# 2048 slots. Chunks are even, and at most this long.
LOGIT_SLOTS = 256

SlotValues = dict[str, Array]  # `[B, T]` each, by name
Batch = Mapping[str, Array]  # see `training.data`


class FrozenModel(NamedTuple):
    """A trained model that is only read; heads and classifiers carry its fingerprint."""

    model: Target
    params: Any
    fingerprint: str = ""

    @classmethod
    def of(cls, loaded: Any) -> "FrozenModel":
        """Takes a model that `specjax.load` returned."""
        return cls(loaded.model, loaded.params, fingerprint(loaded.config, loaded.params))


@dataclass(frozen=True)
class HeadTraining(ABC):
    """Trains the head of one method; the registry names a subclass in the method's row.

    The docstring of a subclass is the help of `specjax train METHOD`. Its fields are the options of
    the head's shape and of its loss, with the published defaults; values out of range are refused.
    """

    top_loss: TopLoss = "top-k"
    """The loss on the target's most likely tokens: top-k, or one of HASS's Table 3."""
    top_weight: float = 0.0
    """Its weight (w); at 0 there is no such loss, and the next two options have no effect."""
    top_k: int = 10
    """The number of tokens it covers (K)."""
    top_p: float = 0.9
    """With top-p: the probability that its tokens add up to."""

    # Defaults of the run; 0 epochs stand for a fixed number of steps.
    optimizer: ClassVar[OptimizerOptions] = OptimizerOptions()
    epochs: ClassVar[float] = 0.0
    # The method that measures the head while it trains; by default the one it is trained for.
    measured_as: ClassVar[str] = ""
    # Fields of the head's config that are set by a flag of another name, and that flag.
    flags: ClassVar[Mapping[str, str]] = MappingProxyType({})
    # Kinds of head, besides its own, that `adopt` can start from.
    adopts: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self):
        check_top_loss(self.top_loss, self.top_k, self.top_p)
        check_not_negative(self, "top_weight")

    @abstractmethod
    def new_head(self, target: TransformerConfig) -> Any:
        """Returns the head that the options ask for, such as an `EagleHead`."""

    @abstractmethod
    def step_loss(self, head: Any, params: Any, step: "Step") -> LossAndMetrics:
        """Returns the loss of one batch, and metrics; `params` are in the target's dtype."""

    def loss(self, head: Any, target: Target, recompute: bool = False) -> LossFn:
        """Returns the loss for `training.loop`; its frozen params are the target's.

        The head computes in the target's dtype, whatever the dtype of its own params. With
        `recompute` activations and logits are computed again for the gradients instead of kept, and
        the logits of at most `LOGIT_SLOTS` slots of each row exist at a time.
        """

        def loss_fn(params: Any, frozen: Any, batch: Batch, key: Key[Array, ""]):
            dtype = target.dtype(frozen)
            params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
            return self.step_loss(head, params, Step(target, frozen, batch, key, recompute))

        return loss_fn

    def adopt(self, head: Any, params: Any, key: Key[Array, ""]) -> tuple[Any, Any]:
        """Turns a head that was loaded to start from into one of the trained kind."""
        del key
        return head, params

    def logit_values(
        self, logits: Float[Array, "B T V"], wanted_logits: Float[Array, "B T V"]
    ) -> SlotValues:
        """Returns the losses of each slot against the target's distribution."""
        values = {
            "logit_loss": soft_cross_entropy(logits, wanted_logits),
            "is_right": jnp.argmax(logits, axis=-1) == jnp.argmax(wanted_logits, axis=-1),
        }
        return values | self.top_values(logits, wanted_logits)

    def top_values(
        self, logits: Float[Array, "... V"], wanted_logits: Float[Array, "... V"]
    ) -> SlotValues:
        """Returns the top loss of each slot by its name; nothing if its weight is 0."""
        if self.top_weight == 0:
            return {}
        kind, k, p = self.top_loss, self.top_k, self.top_p
        return {"top_loss": top_loss(kind, logits, wanted_logits, k, p)}


@dataclass(frozen=True, eq=False)
class Step:
    """One training step: a batch, and the frozen target that reads it."""

    target: Target
    frozen: Any  # its params
    batch: Batch
    key: Key[Array, ""]
    recompute: bool = False
    features: Float[Array, "B T D"] = field(init=False)  # the target's, of all tokens

    def __post_init__(self):
        # XLA drops the target's layers from a program that does not read these.
        places = (self.batch[name] for name in ("tokens", "positions", "segments"))
        features = target_features(self.target, self.frozen, *places)
        object.__setattr__(self, "features", features)

    def embed(self, ahead: int) -> Float[Array, "B T D"]:
        """Returns the embedding of the token `ahead` of each slot."""
        return self.target.embed(self.frozen, later(self.batch["tokens"], ahead))

    def logits(self, features: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Returns the LM head's logits."""
        return self.target.logits(self.frozen, features)

    def checkpoint(self, function: Callable) -> Callable:
        """Has `function` computed again for the gradients, if the step recomputes."""
        return jax.checkpoint(function) if self.recompute else function

    def weighted(
        self, values: SlotValues, depth: int, weights: Mapping[str, float]
    ) -> LossAndMetrics:
        """Returns the weighted sum of the losses of one depth, and the losses as metrics.

        The values are losses of every slot, and `is_right`, whose mean becomes the accuracy. Slots
        count if the token `1 + depth` later is an answer; without any, means are 0.
        """
        counts = slot_mask(self.batch["is_answer"], self.batch["segments"], ahead=1 + depth)
        num_counted = jnp.maximum(jnp.sum(counts), 1)
        found = {
            name: jnp.sum(jnp.where(counts, value, 0.0)) / num_counted
            for name, value in values.items()
        }
        accuracy = found.pop("is_right")[None]
        total = sum((weights[name] * loss for name, loss in found.items()), jnp.zeros(()))
        return total, found | {"accuracy": accuracy}


def target_features(
    target: Target,
    params: Any,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"],
) -> Float[Array, "B T D"]:
    """Returns the target's hidden states after the final norm, as constants for gradients.

    Rows hold one text or several. `positions` count within each text, `segments` number the texts,
    which see only themselves.
    """
    rows = QueryRows(tokens, positions, text_before(segments))
    cache = target.new_cache(params, *tokens.shape)
    output, _ = target.run(params, rows, cache, Taps(hidden_layers=(-1,), logits=False))
    assert output.hidden is not None
    return lax.stop_gradient(output.hidden[:, :, 0])


def later(values: Array, ahead: int = 1) -> Array:
    """Moves values `ahead` slots to the front; the last slots of a row wrap around, uncounted."""
    return jnp.roll(values, -ahead, axis=1)


def over_slots(
    read: Callable[[Any], SlotValues], arrays: PyTree[Array], recompute: bool
) -> SlotValues:
    """Computes values of every slot, such as losses, from `arrays`, `[B, T, ...]` each.

    With `recompute` no `[B, T, V]` ever exists: `read` is called with one chunk of slots after the
    other, and again for the gradients. What it closes over may carry gradients too.
    """
    if not recompute:
        return read(arrays)
    batch, length = jax.tree.leaves(arrays)[0].shape[:2]
    num_chunks = -(-length // LOGIT_SLOTS)
    size = -(-length // num_chunks)

    def split(values: Array) -> Array:
        rest = values.shape[2:]
        filling = [(0, 0), (0, num_chunks * size - length), *((0, 0) for _ in rest)]
        chunks = jnp.pad(values, filling).reshape(batch, num_chunks, size, *rest)
        return jnp.moveaxis(chunks, 1, 0)

    def join(values: Array) -> Array:
        return jnp.moveaxis(values, 0, 1).reshape(batch, -1)[:, :length]

    return jax.tree.map(join, lax.map(jax.checkpoint(read), jax.tree.map(split, arrays)))


def over_depths(parts: Sequence[LossAndMetrics], weights: Iterable[float]) -> LossAndMetrics:
    """Returns the weighted sum of the losses of all depths, and their metrics.

    Metrics are averaged, except for the accuracy, which is listed depth by depth.
    """
    total = jnp.zeros(())
    for (loss, _), weight in zip(parts, weights, strict=True):
        total = total + weight * loss
    columns = {name: [metrics[name] for _, metrics in parts] for name in parts[0][1]}
    accuracy = jnp.concatenate(columns.pop("accuracy"))
    means = {name: jnp.mean(jnp.stack(column)) for name, column in columns.items()}
    return total, means | {"accuracy": accuracy}
