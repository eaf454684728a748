"""What losses are made of; apart from the losses, so that the command line reads it soon."""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from specjax.core.errors import SpecjaxError

TopLoss = Literal[
    "top-k",
    "top-p",
    "normed-top-k-linear",
    "normed-top-k-softmax",
    "bidirectional-top-k",
    "recall-at-k",
    "bild",
]


@dataclass(frozen=True)
class TopLossOptions:
    """HASS's loss on the tokens that are most likely to the target; any objective may add it.

    Raises:
        SpecjaxError: for a value out of its range.
    """

    top_loss: TopLoss = "top-k"
    """The loss on the target's most likely tokens: top-k, or one of HASS's Table 3."""
    top_weight: float = 0.0
    """Its weight (w); at 0 there is no such loss, and the next two do nothing."""
    top_k: int = 10
    """Tokens that it looks at (K)."""
    top_p: float = 0.9
    """Probability that the tokens of top-p make up."""

    def __post_init__(self):
        if self.top_loss not in get_args(TopLoss):
            known = ", ".join(get_args(TopLoss))
            raise SpecjaxError(f"top_loss {self.top_loss!r} is unknown; use {known}")
        if self.top_k < 1:
            raise SpecjaxError(f"top_k {self.top_k} must be at least 1")
        check_finite(self, "top_weight")
        if not 0 <= self.top_p <= 1:
            raise SpecjaxError(f"top_p {self.top_p} is outside [0, 1]")
        if self.top_p == 0:
            raise SpecjaxError("top_p 0 keeps no token; take one above 0")


def check_finite(options: Any, *names: str) -> None:
    """Raises SpecjaxError for fields that are negative or not finite."""
    for name in names:
        if not 0 <= getattr(options, name) < math.inf:
            raise SpecjaxError(f"{name} {getattr(options, name)} is not a finite number >= 0")


@dataclass(frozen=True)
class EagleObjective(TopLossOptions):
    """What the loss is made of.

    Raises:
        SpecjaxError: for a value out of its range.
    """

    feature_weight: float = 1.0
    """Weight of the smooth L1 distance to the target's next feature."""
    logit_weight: float = 0.1
    """Weight of the cross-entropy to the target's distribution."""
    noise: float = 0.2
    """Width of the uniform noise on input features, for a text of 512 tokens; less for longer."""

    def __post_init__(self):
        super().__post_init__()
        check_finite(self, "feature_weight", "logit_weight", "noise")


@dataclass(frozen=True)
class HassObjective(EagleObjective):
    """What the loss is made of; with one step and weight 0 it is EAGLE's.

    Raises:
        SpecjaxError: for a value out of its range.
    """

    top_weight: float = 1.0
    """Its weight (w)."""
    align_steps: int = 3
    """Steps of harmonized context alignment (n); 1 aligns nothing."""
    step_decay: float = 1.0
    """Weight of each step's loss against the step before (beta, Table 5)."""
    token_alignment: float = 0.0
    """Probability that a slot takes the token drafted a step before for the text's (appendix B)."""

    def __post_init__(self):
        super().__post_init__()
        if self.align_steps < 1:
            raise SpecjaxError(f"align_steps {self.align_steps} must be at least 1")
        check_finite(self, "step_decay")
        if not 0 <= self.token_alignment <= 1:
            raise SpecjaxError(f"token_alignment {self.token_alignment} is outside [0, 1]")


@dataclass(frozen=True)
class MedusaObjective(TopLossOptions):
    """What the loss is made of: cross-entropy with the text's tokens at every depth.

    Raises:
        SpecjaxError: for a value out of its range.
    """

    head_decay: float = 0.8
    """Weight of each head's loss against the head before."""

    def __post_init__(self):
        super().__post_init__()
        check_finite(self, "head_decay")


@dataclass(frozen=True)
class HydraObjective(TopLossOptions):
    """What the loss is made of: cross-entropy with the target's distribution at every depth."""


@dataclass(frozen=True)
class ParallelMedusaObjective(MedusaObjective):
    """What the loss is made of: equation 3, cross-entropy with the text's tokens in each group.

    Raises:
        SpecjaxError: for a value out of its range.
    """

    head_decay: float = 0.8
    """Weight of each mask's loss against the slot before (lambda)."""


@dataclass(frozen=True)
class ParallelEagleObjective(EagleObjective):
    """What the loss is made of: equation 4, EAGLE's loss summed over each group.

    Raises:
        SpecjaxError: for a value out of its range.
    """


Objective = (
    EagleObjective
    | HassObjective
    | MedusaObjective
    | HydraObjective
    | ParallelMedusaObjective
    | ParallelEagleObjective
)
METHOD_OF = {  # whose objective it is
    EagleObjective: "eagle",
    HassObjective: "hass",
    MedusaObjective: "medusa",
    HydraObjective: "hydra",
    ParallelMedusaObjective: "parallel-medusa",
    ParallelEagleObjective: "parallel-eagle",
}
