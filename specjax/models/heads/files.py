"""What the folders of all heads have in common: a config that says whose head it is."""

from pathlib import Path
from typing import Any

from specjax.errors import SpecjaxError
from specjax.files import expand_user, read_json, readable
from specjax.models.checkpoint import CONFIG
from specjax.models.config import CHECK, LlamaConfig

ABOUT = "specjax"  # the key of config.json for what other loaders do not ask
HEAD = "head"  # the folder of the head within that of its training run


def read_values(folder: Path, kind: str = "") -> dict[str, Any]:
    """The `config.json` of a head.

    Args:
        folder: of the head.
        kind: of head that is wanted, such as "an EAGLE head", for the message.

    Raises:
        SpecjaxError: if it is missing or damaged.
    """
    path = expand_user(folder) / CONFIG
    with readable(path):
        exists = path.is_file()
    if not exists:
        wanted = kind or "a drafter head"
        raise SpecjaxError(f"{folder} holds no {CONFIG}; give the folder of {wanted}")
    return read_json(path)


def read_about(folder: Path) -> dict[str, Any]:
    """What the head was saved with as `about`; {} for a head of others.

    Raises:
        SpecjaxError: if the config is missing or damaged.
    """
    about = read_values(folder).get(ABOUT, {})
    if not isinstance(about, dict):
        raise SpecjaxError(f"{folder / CONFIG}: {ABOUT} {about!r} is not an object; {CHECK}")
    return about


def check_owner(folder: Path, target: str) -> None:
    """Raises SpecjaxError if the head says (`about["target"]`) that it is of another target.

    Args:
        folder: of the head.
        target: fingerprint of the target that it is to draft for.
    """
    owner = read_about(folder).get("target", target)
    if owner != target:
        raise SpecjaxError(
            f"{folder}: this head was trained for target {owner}, but this one is {target}; "
            "give a head of this target, or train one"
        )


def check_sizes(place: str, hidden_size: int, vocab_size: int, target: LlamaConfig) -> None:
    """Raises SpecjaxError, which begins with `place`, if the head is of a target of other sizes."""
    for title, ours, theirs in (
        ("hidden size", hidden_size, target.hidden_size),
        ("vocabulary", vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            raise SpecjaxError(
                f"{place}: the head is for a target of {title} {ours}, but this one has {theirs}; "
                "give a head that was trained for this target"
            )
