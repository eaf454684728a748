"""What passes of a target cost by their rows, and the machine on which they cost that."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import jax
import numpy as np

from specjax.core.errors import SpecjaxError
from specjax.core.provenance import num_cores


@dataclass(frozen=True)
class RowCosts:
    """What passes of `widths` rows cost, in passes of one row.

    Raises:
        SpecjaxError: for widths that do not ascend from 1, or costs that fall, are not finite and
            positive, or are not theirs.
    """

    widths: tuple[int, ...]
    costs: tuple[float, ...]

    def __post_init__(self):
        ascends = list(self.widths) == sorted(set(self.widths)) and self.widths[:1] == (1,)
        is_sound = are_costs(self.costs) and list(self.costs) == sorted(self.costs)
        if not (ascends and is_sound and len(self.costs) == len(self.widths)):
            raise SpecjaxError(
                f"passes of {self.widths} rows cannot cost {self.costs}; run `specjax tune "
                "machine` again"
            )

    def at(self, rows: int) -> float:
        """The cost of a pass of so many rows: between two widths, and beyond the last, a line."""
        if rows <= self.widths[-1] or len(self.widths) == 1:
            return float(np.interp(rows, self.widths, self.costs))
        slope = (self.costs[-1] - self.costs[-2]) / (self.widths[-1] - self.widths[-2])
        return self.costs[-1] + slope * (rows - self.widths[-1])


def are_costs(costs: tuple[float, ...]) -> bool:
    """Whether all of these can be costs: finite and positive."""
    return all(isfinite(cost) and cost > 0 for cost in costs)


def machine_of(params: Mapping[str, Any]) -> str:
    """What the costs of a target depend on beside the target, such as "cpu, 2 cores, float32".

    Args:
        params: the target's, by whose dtype passes compute.
    """
    device = jax.devices()[0]
    cores = [f"{num_cores()} cores"] if device.platform == "cpu" else []
    return ", ".join([device.device_kind, *cores, str(params["embed_tokens"]["weight"].dtype)])
