"""What a training run can be told; apart from the rest, so that the command line reads it soon."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import arg

from specjax.core.errors import SpecjaxError
from specjax.training.objectives.options import METHOD_OF, Objective

AHEAD = 2  # slot t of an EAGLE head has feature t and token t + 1, and predicts token t + 2
SHORTEST_BUCKET = 64
DEFAULT_STEPS = 2000


@dataclass(frozen=True)
class LoopOptions:
    """How long a run is, and how often it saves, logs and measures, in steps.

    Raises:
        SpecjaxError: for a number below 1.
    """

    num_steps: Annotated[int | None, arg(metavar="INT")] = None
    """Steps of the optimizer; by default 2000, or what --epochs comes to where that is given."""
    save_every: int = 500
    """Steps from checkpoint to checkpoint."""
    log_every: int = 20
    """Steps from line to line of the metrics."""
    eval_every: int = 500
    """Steps from measurement to measurement by real decoding."""
    keep_last: int = 2
    """Newest checkpoints that are kept, beside the best."""
    seed: int = 0
    """Of the first params, the order of the data and the noise."""

    def __post_init__(self):
        for name in ("num_steps", "save_every", "log_every", "eval_every", "keep_last"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpecjaxError(f"{name} {value} must be at least 1")
        if not 0 <= self.seed < 2**32:
            raise SpecjaxError(f"seed {self.seed} is not between 0 and 2**32 - 1")

    @property
    def total_steps(self) -> int:
        """`num_steps`, or the default."""
        return DEFAULT_STEPS if self.num_steps is None else self.num_steps


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW with warm-up, decay, clipping and accumulation. The defaults are EAGLE's and HASS's.

    Raises:
        SpecjaxError: for a value out of its range.
    """

    learning_rate: float = 3e-5
    """The highest; reached after the warm-up."""
    warmup: float = 0.01
    """Share of the run over which the rate rises from 0."""
    decay: Literal["linear", "cosine", "none"] = "linear"
    """How the rate then falls until the end of the run."""
    decay_to: float = 0.0
    """Share of the highest rate that it falls to, with linear and cosine."""
    beta1: float = 0.9
    """Decay of Adam's first moment."""
    beta2: float = 0.95
    """Decay of Adam's second moment."""
    weight_decay: float = 0.01
    """AdamW's, times the rate."""
    clip: Literal["value", "norm", "none"] = "value"
    """Bound each entry of the gradient, or its norm over all params."""
    clip_at: float = 0.5
    """The bound."""
    accumulate: int = 1
    """Batches whose gradients are averaged for one step."""

    def __post_init__(self):
        choices = {"decay": ("linear", "cosine", "none"), "clip": ("value", "norm", "none")}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise SpecjaxError(
                    f"{name} {getattr(self, name)!r} is unknown; use {', '.join(known)}"
                )
        for name in ("learning_rate", "clip_at"):
            if not 0 < getattr(self, name) < math.inf:
                raise SpecjaxError(f"{name} {getattr(self, name)} is not a finite number above 0")
        for name in ("warmup", "decay_to", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise SpecjaxError(f"{name} {getattr(self, name)} is outside [0, 1)")
        if not 0 <= self.weight_decay < math.inf:
            raise SpecjaxError(f"weight_decay {self.weight_decay} is negative or not finite")
        if self.accumulate < 1:
            raise SpecjaxError(f"accumulate {self.accumulate} must be at least 1")


@dataclass(frozen=True)
class DistillOptions:
    """How the target answers.

    Raises:
        SpecjaxError: for a temperature or a number of tokens that is not possible.
    """

    distill_temperature: float = 0.0
    """With --distill: the temperature at which the target answers."""
    distill_tokens: int = 256
    """With --distill: new tokens per answer at most."""
    distill_batch: int = 8
    """With --distill: prompts that are answered together."""

    def __post_init__(self):
        if not 0 <= self.distill_temperature < math.inf:
            raise SpecjaxError(
                f"distill_temperature {self.distill_temperature} is not a finite number >= 0"
            )
        for name in ("distill_tokens", "distill_batch"):
            if getattr(self, name) < 1:
                raise SpecjaxError(f"{name} {getattr(self, name)} must be at least 1")


@dataclass(frozen=True)
class DataOptions:
    """How examples are made into batches.

    Raises:
        SpecjaxError: for sizes that are not possible, or that do not fit together.
    """

    batch_size: int = 8
    """Rows of a batch."""
    longest: int = 2048
    """Tokens of the longest text, and of each row if texts are packed."""
    packing: bool = False
    """Fill rows with several texts, which do not see each other."""
    buckets: tuple[int, ...] = ()
    """Lengths that texts are padded to; by default powers of two up to the longest."""

    def __post_init__(self):
        if self.batch_size < 1 or self.longest <= AHEAD:
            raise SpecjaxError(
                f"batches of {self.batch_size} texts of up to {self.longest} tokens; take at least "
                f"1 and {AHEAD + 1}"
            )
        if self.buckets and self.packing:
            raise SpecjaxError("packed rows all have the longest length; give no buckets")
        if self.buckets and list(self.buckets) != sorted({*self.buckets, self.longest}):
            raise SpecjaxError(
                f"buckets {self.buckets} must grow and end with the longest length, {self.longest}"
            )

    def lengths(self) -> tuple[int, ...]:
        """The lengths of rows, growing."""
        if self.packing:
            return (self.longest,)
        powers = (2**power for power in range(self.longest.bit_length()))
        inner = (length for length in powers if SHORTEST_BUCKET <= length < self.longest)
        return self.buckets or (*inner, self.longest)


@dataclass(frozen=True)
class HeadSettings:
    """Everything that decides a head, but for its shape, the target, the texts and the start."""

    objective: Objective
    loop: LoopOptions = field(default_factory=LoopOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    data: DataOptions = field(default_factory=DataOptions)
    remat: bool = False
    """Keep less for the gradients and compute it again: slower, and smaller in memory."""

    @property
    def method(self) -> str:
        """The method whose objective this is."""
        return METHOD_OF[type(self.objective)]
