"""Reads and writes files that users name; system errors become a one-line `SpecjaxError`."""

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from specjax.core.errors import SpecjaxError

MAX_JSON_BYTES = 2**27  # of a file that is parsed whole, such as config.json or tokenizer.json
MAX_TEXT_BYTES = 2**30  # of a text or a file of questions
MAX_LINE_BYTES = 2**28  # of JSON lines


def expand_user(path: str | Path) -> Path:
    """Replaces a leading `~` or `~name` of `path` by that home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise SpecjaxError(
            f"{path}: there is no home folder {Path(path).parts[0]}; write the path in full"
        ) from None


def cache_folder() -> Path:
    """Returns the folder for caches: `~/.cache/specjax`, or `specjax` in XDG_CACHE_HOME."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # unset, or relative: the XDG specification ignores those
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            raise SpecjaxError("there is no home folder; set XDG_CACHE_HOME or HOME") from None
    return base / "specjax"


@contextmanager
def readable(path: str | Path) -> Iterator[None]:
    """Turns an OSError in the block into a SpecjaxError that names the file, or else `path`."""
    try:
        yield
    except OSError as error:
        raise SpecjaxError(
            f"{error.filename or path} cannot be read ({error.strerror or error}); "
            "check the path and its permissions"
        ) from error


@contextmanager
def reading(file: str | Path) -> Iterator[None]:
    """Turns a failure to read `file` as UTF-8 in the block into a SpecjaxError that names it."""
    try:
        with readable(file):
            yield
    except UnicodeDecodeError:
        raise SpecjaxError(f"{file} is not UTF-8 text; convert it or leave it out") from None


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Turns a failure to write in the block into a SpecjaxError that names `path`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpecjaxError(
            f"cannot write {path} ({reason}); free some space or choose another path"
        ) from error


def writable_folder(folder: Path) -> Path:
    """Creates the folder if it does not exist, and returns it with its `~` expanded."""
    folder = expand_user(folder)
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    check_writable(folder)
    return folder


def check_writable(path: Path, is_file: bool = False) -> None:
    """Checks that files can be written to a folder, or that a file can; leaves no trace."""
    with writable(path):
        if is_file and path.exists():
            path.open("ab").close()
            return
        folder = path.absolute().parent if is_file else path.absolute()
        base = next(parent for parent in (folder, *folder.parents) if parent.exists())
        probe = base / f".{uuid.uuid4().hex}"
        probe.touch()
        probe.unlink()


def check_size(path: Path, max_bytes: int = MAX_JSON_BYTES) -> None:
    """Raises SpecjaxError if a file is too large to read whole."""
    _check_limit(path, path.stat().st_size, max_bytes)


def read_bytes(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Reads a whole file; one without an end, such as a device, is rejected."""
    check_size(path, max_bytes)
    with path.open("rb") as file:
        return read_rest(file, path, max_bytes)


def read_rest(file: BufferedIOBase, name: str | Path, max_bytes: int) -> bytes:
    """Reads an open file, which may be a pipe, to its end."""
    content = file.read(max_bytes + 1)
    _check_limit(name, len(content), max_bytes)
    return content


def _check_limit(name: str | Path, size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise SpecjaxError(
            f"{name} is damaged or too large: it has {size:,} bytes or more, and {max_bytes:,} "
            "bytes are the limit; check it, or download it again"
        )


def bounded_lines(file: BufferedIOBase, name: str | Path) -> Iterator[bytes]:
    """Yields the lines of an open file."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise SpecjaxError(
                f"{name} has a line of more than {MAX_LINE_BYTES:,} bytes; write one JSON object "
                "per line"
            )
        yield line


def read_text(file: Path) -> str:
    """Returns the content of a text file."""
    with reading(file):
        return read_bytes(file, MAX_TEXT_BYTES).decode("utf-8-sig")


def read_json(path: Path) -> dict[str, Any]:
    """Reads the JSON object in the file `path`."""
    with readable(path):
        content = read_bytes(path)
    try:
        values = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise SpecjaxError(
            f"{path} is not valid JSON ({error}); fix it or download it again"
        ) from None
    if not isinstance(values, dict):
        raise SpecjaxError(f"{path} does not hold a JSON object; fix it or download it again")
    return values


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file in one step, into a folder that is made if need be."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(content)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty folder that is renamed to `folder` if the block succeeds, else deleted."""
    folder = vacant(folder)
    unfinished = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.unfinished")
    try:
        with writable(folder):
            unfinished.mkdir(parents=True)
            yield unfinished
            if folder.exists():
                folder.rmdir()
            os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def save_arrays(
    folder: Path, name: str, arrays: Mapping[str, Any], about: Mapping[str, Any]
) -> None:
    """Writes `name`.safetensors and `name`.json to a new `folder`."""
    from safetensors.numpy import save_file

    with new_folder(folder) as unfinished:
        weights, metadata = unfinished / f"{name}.safetensors", unfinished / f"{name}.json"
        save_file(dict(arrays), weights)
        metadata.write_text(f"{json.dumps(about, indent=1)}\n", encoding="utf-8")
        shutil.copymode(metadata, weights)  # safetensors lets only the owner read


def vacant(folder: Path) -> Path:
    """Returns the absolute path of `folder`, which must not exist yet or be empty."""
    folder = Path(os.path.realpath(expand_user(folder)))
    with writable(folder):
        is_vacant = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_vacant:
        raise SpecjaxError(
            f"{folder} already exists and is not an empty folder; delete it or choose another name"
        )
    check_writable(folder.parent)
    return folder
