"""The optimizer of a run: Optax, put together from a few settings."""

import optax

from specjax.training.config import OptimizerOptions


def schedule(options: OptimizerOptions, num_steps: int) -> optax.Schedule:
    """Step, from 0 -> learning rate."""
    rising = round(options.warmup * num_steps)
    falling = max(1, num_steps - rising)
    lowest = options.decay_to * options.learning_rate
    after = {
        "linear": optax.linear_schedule(options.learning_rate, lowest, falling),
        "cosine": optax.cosine_decay_schedule(options.learning_rate, falling, options.decay_to),
        "none": optax.constant_schedule(options.learning_rate),
    }[options.decay]
    # From the first step on: a rate of 0 would waste it.
    before = lambda step: options.learning_rate * (step + 1) / (rising + 1)  # noqa: E731
    return optax.join_schedules([before, after], [rising])


def optimizer_of(options: OptimizerOptions, num_steps: int) -> optax.GradientTransformation:
    """The optimizer of a run of `num_steps` steps."""
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
    together = optax.chain(clipping, adamw)
    if options.accumulate == 1:
        return together
    return optax.MultiSteps(together, options.accumulate).gradient_transformation()
