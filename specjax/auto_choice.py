"""What the method `auto` does for a target on this device: read from what tuning has found."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specjax.errors import SpecjaxError

ADVICE = "`specjax tune machine` measures what is best"


@dataclass(frozen=True)
class AutoChoice:
    """The method behind the gate, and why that one.

    `source` to `expected` are those of `Gated`, and None unless the choice was tuned here.
    """

    why: str
    method: str = "pld"
    settings: Mapping[str, Any] = field(default_factory=dict)
    source: str | None = None
    row_widths: tuple[int, ...] = ()
    costs: tuple[float, ...] = ()
    expected: float = 0.0
    is_tuned: bool = False

    def __str__(self) -> str:
        """A line for the user, such as "auto is pld (num_tokens=7), as tuned on this device"."""
        settings = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"auto is {self.method}" + (f" ({settings})" if settings else "") + f", {self.why}"


def read_choice(known: Mapping[str, Any], device: str) -> AutoChoice:
    """The choice among `known`, the tuned settings of `auto`, if it was made on this device.

    Raises:
        SpecjaxError: if the settings are not such a choice.
    """
    if not known:
        return AutoChoice(f"not tuned: {ADVICE}")
    try:
        choice = AutoChoice(
            why="as tuned on this device",
            method=known["method"],
            settings=dict(known["settings"]),
            source=known["source"],
            row_widths=tuple(map(int, known["row_widths"])),
            costs=tuple(map(float, known["costs"])),
            expected=float(known["expected"]),
            is_tuned=True,
        )
        tuned_on = known["device"]
    except (KeyError, TypeError, ValueError) as error:
        raise SpecjaxError(
            f"what was tuned for auto is damaged ({type(error).__name__}: {error}); run `specjax "
            "tune machine` again"
        ) from None
    if tuned_on != device:
        return AutoChoice(f"tuned on {tuned_on}, not on this {device}: {ADVICE}")
    return choice
