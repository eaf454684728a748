"""The optimizer of a run: its options, its learning-rate schedule, and the Optax transformation."""

from dataclasses import dataclass
from typing import Literal

import optax

from specjax.core.settings import Checked, setting


@dataclass(frozen=True)
class OptimizerOptions(Checked):
    """AdamW, with the values of EAGLE and HASS as defaults."""

    learning_rate: float = setting(3e-5, above=0)
    """The highest learning rate, reached after the warm-up."""
    warmup: float = setting(0.01, at_least=0, below=1)
    """Share of the run over which the rate rises from 0."""
    decay: Literal["linear", "cosine", "none"] = "linear"
    """The shape of the decay from then until the end of the run."""
    decay_to: float = setting(0.0, at_least=0, below=1)
    """Share of the highest rate that linear and cosine decay end at."""
    beta1: float = setting(0.9, at_least=0, below=1)
    """Decay of Adam's first moment."""
    beta2: float = setting(0.95, at_least=0, below=1)
    """Decay of Adam's second moment."""
    weight_decay: float = setting(0.01, at_least=0)
    """AdamW's weight decay, multiplied by the rate."""
    clip: Literal["value", "norm", "none"] = "value"
    """Bound each entry of the gradient, or its norm over all params."""
    clip_at: float = setting(0.5, above=0)
    """The bound."""
    accumulate: int = setting(1, at_least=1)
    """Batches whose gradients are averaged for one step."""


def schedule(options: OptimizerOptions, num_steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the step, counted from 0."""
    num_rising = round(options.warmup * num_steps)
    num_falling = max(1, num_steps - num_rising)
    lowest = options.decay_to * options.learning_rate
    after = {
        "linear": optax.linear_schedule(options.learning_rate, lowest, num_falling),
        "cosine": optax.cosine_decay_schedule(options.learning_rate, num_falling, options.decay_to),
        "none": optax.constant_schedule(options.learning_rate),
    }[options.decay]
    # A rate of 0 would waste the first step.
    before = lambda step: options.learning_rate * (step + 1) / (num_rising + 1)  # noqa: E731
    return optax.join_schedules([before, after], [num_rising])


def optimizer_of(options: OptimizerOptions, num_steps: int) -> optax.GradientTransformation:
    """Builds the optimizer of a run of `num_steps` steps."""
    clipping = {
        "value": optax.clip(options.clip_at),
        "norm": optax.clip_by_global_norm(options.clip_at),
        "none": optax.identity(),
    }[options.clip]
    rate, betas = schedule(options, num_steps), (options.beta1, options.beta2)
    adamw = optax.adamw(rate, *betas, weight_decay=options.weight_decay)
    optimizer = optax.chain(clipping, adamw)
    if options.accumulate == 1:
        return optimizer
    return optax.MultiSteps(optimizer, options.accumulate).gradient_transformation()
