"""Drafter heads: small trained networks that read the target and draft."""

from typing import Any, NamedTuple

from specjax.models.target import Target


class HeadWeights(NamedTuple):
    """The weights that a head computes with, and the target."""

    params: Any
    target: Target
    target_params: Any
