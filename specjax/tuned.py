"""What tuning has found for a target: settings of methods, in a small JSON beside its weights."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specjax.core.errors import SpecjaxError
from specjax.core.files import read_json, writable

FILE = "specjax.json"


@dataclass(frozen=True)
class Tuned:
    """Settings per method in place of its defaults, and the heads that copy."""

    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    induction_heads: tuple[tuple[int, int, int], ...] = ()  # layer, head, times; the best first


def read_tuned(path: Path, owner: str) -> Tuned:
    """The file's content, for the model with fingerprint `owner`.

    Raises:
        SpecjaxError: if the file cannot be read, is malformed or was made for another model.
    """
    values = read_json(path)
    try:
        made_for = values["target"]
        settings = {name: _frozen(dict(fields)) for name, fields in values["settings"].items()}
        heads = tuple((int(a), int(b), int(c)) for a, b, c in values.get("induction_heads", []))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpecjaxError(
            f"{path} is no file of `specjax tune` ({type(error).__name__}: {error}); "
            "delete it or tune again"
        ) from None
    if made_for != owner:
        raise SpecjaxError(
            f"{path} was made for another model ({made_for}, this one is {owner}); tune this "
            "target, or move the file away"
        )
    return Tuned(settings, heads)


def write_tuned(path: Path, tuned: Tuned, owner: str) -> None:
    """Replaces the file in one step.

    Raises:
        SpecjaxError: if the folder cannot be written.
    """
    values = {
        "target": owner,
        "settings": tuned.settings,
        "induction_heads": tuned.induction_heads,
    }
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def _frozen(value: Any) -> Any:
    """Lists become tuples: settings are hashed."""
    if isinstance(value, dict):
        return {name: _frozen(each) for name, each in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
