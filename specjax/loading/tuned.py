"""The files of tuned settings: what `specjax tune` found for a target, and where it is kept.

Tuning writes to the user's cache folder. A `specjax.json` beside the weights of a local target,
such as pocket's, is read too; the user's entries override it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any

import jax

from specjax.core.errors import SpecjaxError
from specjax.core.files import cache_folder, expand_user, read_json, write_whole
from specjax.core.provenance import num_cores
from specjax.loading.hub import POCKET, pocket_folder
from specjax.loading.targets import LoadedTarget
from specjax.models.fingerprint import fingerprint

FILE = "specjax.json"
AUTO = "auto"  # the method whose entry is an `AutoChoice`
ADVICE = "`specjax tune machine` measures what is best"


@dataclass(frozen=True)
class Tuned:
    """Settings per method in place of its defaults, and the heads that copy."""

    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    induction_heads: tuple[tuple[int, int, int], ...] = ()  # layer, head, times; the best first

    def updated(self, other: "Tuned") -> "Tuned":
        """Returns these settings, overridden by those of `other`."""
        heads = other.induction_heads or self.induction_heads
        return replace(self, settings={**self.settings, **other.settings}, induction_heads=heads)


def tuned_for(target: LoadedTarget, path: str | Path | None = None) -> Tuned:
    """Returns what is tuned for a target: in the file `path`, or else in all files there are."""
    owner = fingerprint(target.config, target.params)
    if path is not None:
        return read_tuned(expand_user(path), owner)
    tuned = Tuned()
    for find in (_shipped_file, tuned_file):
        try:
            file = find(target)
            exists = file.is_file()
        except (SpecjaxError, OSError):  # no home, or one that must not be read: nothing was tuned
            continue
        tuned = tuned.updated(read_tuned(file, owner)) if exists else tuned
    return tuned


def tuned_file(target: LoadedTarget) -> Path:
    """Returns the user's file of a target, whether there is one or not."""
    is_folder = target.name != POCKET and expand_user(target.name).exists()
    name = expand_user(target.name).resolve().name if is_folder else target.name
    label = re.sub(r"[^\w.-]+", "--", name)
    owner = fingerprint(target.config, target.params)
    return cache_folder() / "tuned" / f"{label}-{owner}.json"


def _shipped_file(target: LoadedTarget) -> Path:
    folder = pocket_folder() if target.name == POCKET else expand_user(target.name)
    return folder / FILE


def read_tuned(path: Path, owner: str) -> Tuned:
    """Reads a file, for the model with fingerprint `owner`."""
    values = read_json(path)
    try:
        made_for = values["target"]
        settings = {name: _frozen(dict(fields)) for name, fields in values["settings"].items()}
        heads = tuple((int(a), int(b), int(c)) for a, b, c in values.get("induction_heads", []))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpecjaxError(
            f"{path} is not a file of `specjax tune` ({type(error).__name__}: {error}); "
            "delete it, then tune again"
        ) from None
    if made_for != owner:
        raise SpecjaxError(
            f"{path} was made for another model ({made_for}, this one is {owner}); tune this "
            "target, or move the file away"
        )
    return Tuned(settings, heads)


def write_tuned(path: Path, tuned: Tuned, owner: str) -> None:
    """Replaces a file in one step."""
    values = {"target": owner, "settings": tuned.settings, "induction_heads": tuned.induction_heads}
    write_whole(path, f"{json.dumps(values, indent=1)}\n".encode())


def _frozen(value: Any) -> Any:
    """Turns lists into tuples: settings are hashed."""
    if isinstance(value, dict):
        return {name: _frozen(entry) for name, entry in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class AutoChoice:
    """The method behind the gate of `auto`, as `specjax tune machine` chose it, or by default.

    `settings` are complete: nothing that is tuned for the method itself is added.
    """

    machine: str
    method: str = "pld"
    settings: Mapping[str, Any] = field(default_factory=dict)
    source: str | None = None  # a folder or hub id; None: the method's default
    break_even: float = 0.0
    widths: tuple[int, ...] = ()  # of the passes that were timed; empty if none were
    why: str = "as tuned on this machine"

    def __str__(self) -> str:
        """Describes it, such as "auto is pld (num_tokens=7), as tuned on this machine"."""
        settings = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{AUTO} is {self.method}" + (f" ({settings})" if settings else "") + f", {self.why}"

    def record(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "why"}


def auto_choice(target: LoadedTarget, path: str | Path | None = None) -> AutoChoice:
    """Returns the method that `auto` uses for this target and machine; see `tuned_for`."""
    entry, machine = tuned_for(target, path).settings.get(AUTO), machine_of(target)
    if not entry:
        return AutoChoice(machine, why=f"not tuned: {ADVICE}")
    if set(entry) - {field.name for field in fields(AutoChoice)}:
        return AutoChoice(machine, why=f"tuned by an earlier version: {ADVICE}")
    try:
        choice = AutoChoice(**entry)
        if not isinstance(choice.settings, Mapping):
            raise TypeError(f"settings {choice.settings!r}")
        if choice.machine != machine:
            why = f"tuned on another machine ({choice.machine}; this is {machine}): {ADVICE}"
            return AutoChoice(machine, why=why)
        if choice.method == AUTO or not choice.widths or not isfinite(choice.break_even):
            raise ValueError(f"{choice.method}, {choice.widths} and {choice.break_even}")
        return choice
    except (TypeError, ValueError) as error:
        raise SpecjaxError(
            f"auto's tuned settings are damaged ({type(error).__name__}: {error}); run `specjax "
            "tune machine` again"
        ) from None


def machine_of(target: LoadedTarget) -> str:
    """Describes the machine that a break-even is measured on: "cpu, 2 cores, float32"."""
    device = jax.devices()[0]
    cores = [f"{num_cores()} cores"] if device.platform == "cpu" else []
    return ", ".join([device.device_kind, *cores, target.dtype_name])
