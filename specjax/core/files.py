"""Files and folders as users name them: what the system refuses becomes one line."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from specjax.core.errors import SpecjaxError


def expand_user(path: str | Path) -> Path:
    """`path` with a leading `~` or `~name` replaced by that home folder.

    Raises:
        SpecjaxError: if there is no such home.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise SpecjaxError(
            f"{path}: there is no home folder {Path(path).parts[0]}; write the path in full"
        ) from None


def cache_folder() -> Path:
    """What may be lost is kept in `~/.cache/specjax`, or under XDG_CACHE_HOME.

    Raises:
        SpecjaxError: if there is no home.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # unset; relative ones are void by the XDG specification
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            raise SpecjaxError("there is no home folder; set XDG_CACHE_HOME or HOME") from None
    return base / "specjax"


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raises SpecjaxError where the block meets an OSError; it names the file, or else `path`."""
    try:
        yield
    except OSError as error:
        raise SpecjaxError(
            f"{error.filename or path} cannot be read ({error.strerror or error}); "
            "check the path and its permissions"
        ) from error


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Raises SpecjaxError, which names `path`, where the block fails to write to it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpecjaxError(
            f"cannot write {path} ({reason}); free some space or choose another path"
        ) from error


def writable_folder(folder: Path) -> Path:
    """The folder, made if there is none, with its `~` expanded.

    Raises:
        SpecjaxError: if it cannot be made, or nothing can be written into it.
    """
    folder = expand_user(folder)
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{os.getpid()}"
        probe.touch()
        probe.unlink()
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object that `path` holds.

    Raises:
        SpecjaxError: if the file cannot be read, or holds something else.
    """
    with readable(path):
        content = path.read_bytes()
    try:
        values = json.loads(content.decode("utf-8"))
    except ValueError as error:
        raise SpecjaxError(f"{path} is not valid JSON ({error}); fetch it again") from None
    if not isinstance(values, dict):
        raise SpecjaxError(f"{path} holds no JSON object; fetch it again")
    return values
