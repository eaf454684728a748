"""The base class of the objectives of all heads, and the step that their losses read."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from specjax.core.pytree import cast_floats, pytree, static
from specjax.core.ranking import best_token
from specjax.core.settings import SettingError, check_fields, setting
from specjax.models.config import TransformerConfig
from specjax.models.heads import HeadWeights
from specjax.models.heads.training_attention import longest_text, text_before
from specjax.models.quantize import Weight
from specjax.models.target import QueryRows, Taps, Target
from specjax.training.blocks import SlotValues, sum_slots
from specjax.training.data import slot_mask
from specjax.training.losses import (
    DistributionLoss,
    LossAndMetrics,
    LossFn,
    TopLoss,
    distribution_loss,
    top_loss,
)
from specjax.training.optimizer import OptimizerOptions

Batch = Mapping[str, Array]  # see `training.data`


@pytree
class Prediction:
    """The outputs of a head at one depth, slot by slot, from which logits can be computed."""

    ahead: int = static()  # slots from the one that predicts to the one whose feature is predicted
    inputs: Any = ()  # floats, to which gradients flow, `[B, T, ...]` each
    fixed: Any = ()  # other arrays, `[B, T, ...]` each


class Teacher(NamedTuple):
    """The target's outputs at some slots, without gradients."""

    features: Float[Array, "B C D"]
    logits: Float[Array, "B C V"]  # or of a draft vocabulary: see `Step.losses`
    labels: Int[Array, "B C"]  # the tokens of the text that follow the slots


# Trained params, a prediction and the target's outputs -> losses of each slot, and `is_right`.
ValuesOf = Callable[[Any, Prediction, Teacher], SlotValues]


@dataclass(frozen=True)
class HeadTraining(ABC):
    """Trains the head of one method; the registry names a subclass in the method's row.

    The docstring of a subclass is the help of `specjax train METHOD`, and its fields are options.
    """

    distribution_loss: DistributionLoss = "cross-entropy"
    """The loss on the whole distribution: the published cross-entropy, or an LK loss, which aims at
    acceptance (lk-lambda blends the divergence and the overlap with the target's distribution,
    lk-alpha is the overlap's logarithm)."""
    top_loss: TopLoss = "top-k"
    """The loss on the target's most likely tokens (HASS, Table 3)."""
    top_weight: float = setting(0.0, at_least=0)
    """The weight of that loss (w); 0 leaves it out."""
    top_k: int = setting(10, at_least=1)
    """The number of tokens it covers (K)."""
    top_p: float = setting(0.9, above=0, at_most=1)
    """With top-p: the probability that its tokens add up to."""

    # Defaults of the run; 0 epochs stand for a fixed number of steps.
    optimizer: ClassVar[OptimizerOptions] = OptimizerOptions()
    epochs: ClassVar[float] = 0.0
    # The method that measures the head while it trains; by default the one it is trained for.
    measured_as: ClassVar[str] = ""
    # Fields of the head's config that are set by a flag of another name, and that flag.
    flags: ClassVar[Mapping[str, str]] = {}
    # Other kinds of head that `adopt` can start from.
    adopts: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self):
        check_fields(self)
        if self.top_loss == "bild" and self.top_k < 2:
            raise SettingError("top_k", "must be at least 2, as bild compares pairs; try 8")

    @abstractmethod
    def new_head(self, target: TransformerConfig) -> Any:
        """Returns the head that the options describe, such as an `EagleHead`."""

    @abstractmethod
    def step_loss(self, head: Any, params: Any, step: "Step") -> LossAndMetrics:
        """Returns the loss of one batch, and metrics; `params` are in the target's dtype."""

    def loss(self, head: Any, target: Target, recompute: bool = False) -> LossFn:
        """Returns the loss for `training.loop`, computed in the target's dtype.

        With `recompute` activations are computed again for the gradients instead of kept.
        """

        def loss_fn(params: Any, frozen: Any, batch: Batch, key: Key[Array, ""]):
            step = Step(target, frozen, batch, key, recompute, layers_read(head))
            return self.step_loss(head, cast_floats(params, target.dtype(frozen)), step)

        return loss_fn

    def adopt(self, head: Any, params: Any, key: Key[Array, ""]) -> tuple[Any, Any]:
        """Turns a head that was loaded to start from into one of the trained kind."""
        return head, params

    def logit_values(
        self, logits: Float[Array, "B T V"], target_logits: Float[Array, "B T V"]
    ) -> SlotValues:
        """Returns the losses of each slot against the target's distribution."""
        values = {
            "logit_loss": distribution_loss(self.distribution_loss, logits, target_logits),
            "is_right": best_token(logits) == best_token(target_logits),
        }
        return values | self.top_values(logits, target_logits)

    def top_values(
        self, logits: Float[Array, "... V"], target_logits: Float[Array, "... V"]
    ) -> SlotValues:
        """Returns the top loss of each slot by its name; nothing if its weight is 0."""
        if self.top_weight == 0:
            return {}
        return {"top_loss": top_loss(self.top_loss, logits, target_logits, self.top_k, self.top_p)}


@dataclass(frozen=True, eq=False)
class Step:
    """One training step: a batch, and the frozen target that reads it."""

    target: Target
    frozen: Any  # its params
    batch: Batch
    key: Key[Array, ""]
    recompute: bool = False
    layers: tuple[int, ...] = (-1,)  # of the target, whose hidden states are read
    features: Float[Array, "B T D"] = field(init=False)  # the target's, of all tokens
    tapped: Float[Array, "B T F"] = field(init=False)  # those of further layers, side by side

    def __post_init__(self):
        if (hidden := self.batch.get("hidden")) is None:
            # XLA drops the target's layers from a program that does not read these.
            hidden = hidden_states(self.target, self.frozen, self.layers, *self.places)
            hidden = hidden.reshape(*hidden.shape[:2], -1)
        size = self.target.config.hidden_size
        assert hidden.shape[-1] == len(self.layers) * size
        object.__setattr__(self, "features", hidden[:, :, :size])
        object.__setattr__(self, "tapped", hidden[:, :, size:])

    @property
    def places(self) -> tuple[Int[Array, "B T"], Int[Array, "B T"], Int[Array, "B T"]]:
        """The tokens, with their positions in their texts and the numbers of these."""
        return self.batch["tokens"], self.batch["positions"], self.batch["segments"]

    def embed(self, ahead: int) -> Float[Array, "B T D"]:
        """Returns the embedding of the token `ahead` of each slot."""
        return self.target.embed(self.frozen, later(self.batch["tokens"], ahead))

    def logits(
        self, features: Float[Array, "B T D"], lm_head: Weight | None = None
    ) -> Float[Array, "B T V"]:
        """Returns the logits of the target's LM head, or of some of its rows."""
        return self.target.logits(self.frozen, features, lm_head)

    def weights(self, params: Any) -> HeadWeights:
        """Returns what a head with these params computes with."""
        return HeadWeights(params, self.target, self.frozen)

    def checkpoint(self, function: Callable) -> Callable:
        """Makes gradients compute `function` again, if the step recomputes."""
        return jax.checkpoint(function) if self.recompute else function

    def run_head(
        self, head: Any, params: Any, embedded: Array, features: Array, streams: tuple = ()
    ) -> tuple[Float[Array, "B T D"], tuple]:
        """Runs a head at one depth, after the streams of depths before; returns one more stream."""
        run = self.checkpoint(head.step)
        outputs, stream = run(params, embedded, features, streams, *self.places[1:])
        return outputs, (*streams, stream)

    def losses(
        self,
        values_of: ValuesOf,
        predictions: Sequence[Prediction],
        weights: Mapping[str, float],
        decays: Sequence[float] | None = None,
        trained: Any = (),
        lm_head: Weight | None = None,
    ) -> LossAndMetrics:
        """Returns the loss of all predictions together, and metrics.

        A slot counts if the token it predicts is an answer's; means over no slots are 0. Metrics
        are means over predictions too, except for the accuracy, which is listed. `weights` are
        those of the losses, by their names in the values; `decays` those of the predictions. The
        teacher's logits are those of `lm_head`, by default the target's.
        """
        decays = decays or [1.0] * len(predictions)
        aheads = [prediction.ahead for prediction in predictions]
        # Moved from the slots that predict to those that are predicted:
        arrived = [jax.tree.map(partial(later, ahead=-p.ahead), p) for p in predictions]
        shares = tuple(map(self._share, aheads))
        labels = later(self.batch["tokens"])
        fixed = (self.features, labels, shares, tuple(prediction.fixed for prediction in arrived))

        def loss_of(trained, inputs, fixed):
            features, labels, shares, others = fixed
            teacher = Teacher(features, self.logits(features, lm_head), labels)
            total, columns = jnp.zeros(()), []
            parts = zip(aheads, shares, decays, inputs, others, strict=True)
            for ahead, share, decay, *outputs in parts:
                values = values_of(trained, Prediction(ahead, *outputs), teacher)
                means = {
                    name: jnp.sum(jnp.where(share > 0, share * value, 0.0))
                    for name, value in values.items()
                }
                for name, weight in weights.items():
                    total += decay * weight * means.get(name, 0.0)
                columns.append(means)
            return total, columns

        inputs = tuple(prediction.inputs for prediction in arrived)
        total, columns = cast(Any, sum_slots(loss_of, trained, inputs, fixed))
        metrics = {name: jnp.stack([column[name] for column in columns]) for name in columns[0]}
        accuracy = {"accuracy": metrics.pop("is_right")}
        return total, {name: jnp.mean(values) for name, values in metrics.items()} | accuracy

    def _share(self, ahead: int) -> Float[Array, "B T"]:
        """Returns the share of each slot in a mean, moved to the slot that is predicted."""
        counts = slot_mask(self.batch["is_answer"], self.batch["segments"], ahead=1 + ahead)
        return later(counts / jnp.maximum(jnp.sum(counts), 1), -ahead)


def layers_read(head: Any) -> tuple[int, ...]:
    """Returns the target's layers that training a head reads: the last, then others it taps."""
    taps = getattr(head.config, "taps", ())
    return (-1,) if taps == (-1,) else (-1, *taps)


def hidden_states(
    target: Target,
    params: Any,
    layers: tuple[int, ...],
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"],
) -> Float[Array, "B T L D"]:
    """Returns the target's hidden states after some layers, as constants for gradients.

    `segments` number the texts of a sequence, which do not attend to each other; `positions` count
    within each.
    """
    rows = QueryRows(tokens, positions, text_before(segments))
    cache = target.new_cache(params, *tokens.shape, prompt_length=longest_text(positions))
    output, _ = target.run(params, rows, cache, Taps(hidden_layers=layers, logits=False))
    assert output.hidden is not None
    return lax.stop_gradient(output.hidden)


def later(values: Array, ahead: int = 1) -> Array:
    """Shifts values left by `ahead` slots; the last ones wrap around and are not counted."""
    return jnp.roll(values, -ahead, axis=1)
