"""What the method `auto` does for a target on this machine: read from what tuning has found."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specjax.core.errors import SpecjaxError

ADVICE = "`specjax tune machine` measures what is best"
NEVER_CHOSEN = ("auto", "lookahead")  # not behind a gate


@dataclass(frozen=True)
class AutoChoice:
    """The method behind the gate, and why that one.

    `settings` are whole: nothing that was tuned for the method itself comes beside them.
    `row_widths` to `row_costs` are those of `Gated`, and empty unless the choice was tuned here.
    """

    why: str
    method: str = "pld"
    settings: Mapping[str, Any] = field(default_factory=dict)
    source: str | None = None
    row_widths: tuple[int, ...] = ()
    costs: tuple[float, ...] = ()
    expected: float = 0.0
    asked_cost: float = 1.0
    row_costs: tuple[tuple[int, ...], tuple[float, ...]] = ((), ())  # of `RowCosts`
    is_tuned: bool = False

    def __str__(self) -> str:
        """A line for the user, such as "auto is pld (num_tokens=7), as tuned on this machine"."""
        settings = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"auto is {self.method}" + (f" ({settings})" if settings else "") + f", {self.why}"


def read_choice(known: Mapping[str, Any], machine: str) -> AutoChoice:
    """The choice among `known`, the tuned settings of `auto`, if it was made on this machine.

    Raises:
        SpecjaxError: if the settings are not such a choice.
    """
    if not known:
        return AutoChoice(f"not tuned: {ADVICE}")
    try:
        tuned_on = str(known["device"])
        if tuned_on != machine:
            return AutoChoice(f"tuned on {tuned_on} and not on this, {machine}: {ADVICE}")
        row_costs = known["row_costs"]
        return AutoChoice(
            why="as tuned on this machine",
            method=_method(known["method"]),
            settings=dict(known["settings"]),
            source=None if known["source"] is None else str(known["source"]),
            row_widths=tuple(map(int, known["row_widths"])),
            costs=tuple(map(float, known["costs"])),
            expected=float(known["expected"]),
            asked_cost=float(known["asked_cost"]),
            row_costs=(
                tuple(map(int, row_costs["widths"])),
                tuple(map(float, row_costs["costs"])),
            ),
            is_tuned=True,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SpecjaxError(
            f"what was tuned for auto is damaged ({type(error).__name__}: {error}); run `specjax "
            "tune machine` again"
        ) from None


def _method(name: Any) -> str:
    if not isinstance(name, str) or name in NEVER_CHOSEN:
        raise ValueError(f"the method cannot be {name!r}")
    return name
