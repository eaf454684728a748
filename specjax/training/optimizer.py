"""The optimizer of a run: its options, its learning-rate schedule, and how Optax builds it."""

from dataclasses import dataclass
from typing import Literal

import optax

from specjax.core.errors import SpecjaxError
from specjax.training.ranges import (
    check_at_least_one,
    check_choice,
    check_not_negative,
    check_positive,
)


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW with EAGLE's and HASS's values as defaults; values out of range are refused."""

    learning_rate: float = 3e-5
    """The highest learning rate, reached after the warm-up."""
    warmup: float = 0.01
    """Share of the run over which the rate rises from 0."""
    decay: Literal["linear", "cosine", "none"] = "linear"
    """How the rate then falls until the end of the run."""
    decay_to: float = 0.0
    """Share of the highest rate that linear and cosine decay end at."""
    beta1: float = 0.9
    """Decay of Adam's first moment."""
    beta2: float = 0.95
    """Decay of Adam's second moment."""
    weight_decay: float = 0.01
    """AdamW's weight decay, multiplied by the rate."""
    clip: Literal["value", "norm", "none"] = "value"
    """Bound each entry of the gradient, or its norm over all params."""
    clip_at: float = 0.5
    """The bound."""
    accumulate: int = 1
    """Batches whose gradients are averaged for one step."""

    def __post_init__(self):
        check_choice(self, "decay", ("linear", "cosine", "none"))
        check_choice(self, "clip", ("value", "norm", "none"))
        check_positive(self, "learning_rate", "clip_at")
        for name in ("warmup", "decay_to", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise SpecjaxError(f"{name} {getattr(self, name)} is outside [0, 1)")
        check_not_negative(self, "weight_decay")
        check_at_least_one(self, "accumulate")


def schedule(options: OptimizerOptions, num_steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the step, counted from 0."""
    rising = round(options.warmup * num_steps)
    falling = max(1, num_steps - rising)
    lowest = options.decay_to * options.learning_rate
    after = {
        "linear": optax.linear_schedule(options.learning_rate, lowest, falling),
        "cosine": optax.cosine_decay_schedule(options.learning_rate, falling, options.decay_to),
        "none": optax.constant_schedule(options.learning_rate),
    }[options.decay]
    # The first step already has a rate above 0: otherwise it would be wasted.
    before = lambda step: options.learning_rate * (step + 1) / (rising + 1)  # noqa: E731
    return optax.join_schedules([before, after], [rising])


def optimizer_of(options: OptimizerOptions, num_steps: int) -> optax.GradientTransformation:
    """Builds the optimizer of a run of `num_steps` steps."""
    clipping = {
        "value": optax.clip(options.clip_at),
        "norm": optax.clip_by_global_norm(options.clip_at),
        "none": optax.identity(),
    }[options.clip]
    adamw = optax.adamw(
        schedule(options, num_steps),
        options.beta1,
        options.beta2,
        weight_decay=options.weight_decay,
    )
    whole = optax.chain(clipping, adamw)
    if options.accumulate == 1:
        return whole
    return optax.MultiSteps(whole, options.accumulate).gradient_transformation()
