"""Reads numbered JSON records from files, addresses and hub datasets; skips and counts bad ones.

A file holds one JSON value per line, or one JSON array of objects.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote
from urllib.request import urlopen

from huggingface_hub import hf_hub_download

from specjax.core.errors import SpecjaxError, warn
from specjax.core.files import (
    MAX_TEXT_BYTES,
    bounded_lines,
    expand_user,
    read_bytes,
    read_rest,
    reading,
)

TURN_KEYS = ("conversations", "conversation", "messages")  # of chats; the first wins
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
# A hub id, which may go on with a configuration and a split; or the address of a JSON file.
DATASET_ID = re.compile(rf"(?!.*\.jsonl?$){HUB_ID.pattern}(:[\w.-]*)?(:[\w.-]+)?|https?://\S+")
HUB_FILE = re.compile(r"https://huggingface\.co/datasets/([^/]+/[^/]+)/resolve/([^/]+)/([^?]+).*")
NUM_NAMED = 3  # bad records of a source that are named one by one
_ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*[{\]]")  # otherwise a list is one line

_Value = TypeVar("_Value")


class Record(NamedTuple):
    """One JSON value of a source."""

    place: str  # such as "data.jsonl:3"
    value: Any = None
    problem: str = ""  # why there is no value


def is_dataset(source: str | Path) -> bool:
    """Whether a source is an address or hub id; files and folders come first."""
    return DATASET_ID.fullmatch(str(source)) is not None and not os.path.exists(expand_user(source))


def read_records(source: str | Path) -> Iterator[Record]:
    """Returns an iterator over the records of a source, which must exist.

    Args:
        source: a file; the address of one; or the hub id of a dataset: OWNER/NAME,
            OWNER/NAME:CONFIGURATION or OWNER/NAME:CONFIGURATION:SPLIT, by default "train".
    """
    path = expand_user(source)
    if str(source) and os.path.exists(path):  # False for a text in its place
        return _in_file(path)
    if not is_dataset(source):
        raise SpecjaxError(f"{source} does not exist and is not a hub id; check the path")
    return _on_hub(str(source))


def good_records(
    source: str | Path,
    records: Iterable[Record],
    convert: Callable[[Any], _Value],
    expected: str,
    limit: int | None = None,
    complain: Callable[[str], None] = warn,
) -> Iterator[_Value]:
    """Yields every record after `convert`; skips those that it rejects.

    Args:
        source: where the records come from, for messages.
        records: from `read_records`.
        convert: raises SpecjaxError for a bad record, with a message that follows its place.
        expected: what a source holds and how to write it, such as "tasks; write ...".
        limit: stop after this many good records.
        complain: called for the first bad records, and with the number of all.
    """
    num_good, num_bad, first = 0, 0, ""
    for place, value, problem in records:
        try:
            if problem:
                raise SpecjaxError(problem)
            converted = convert(value)
        except SpecjaxError as error:
            num_bad += 1
            first = first or f" ({place} {error})"
            if num_bad <= NUM_NAMED:
                complain(f"{place} {error}; it is left out")
            continue
        num_good += 1
        yield converted
        if num_good == limit:
            break
    if not num_good:
        what, _, advice = expected.partition("; ")
        raise SpecjaxError(f"{source} holds no {what}{first or ' (it is empty)'}; {advice}")
    if num_bad:
        complain(f"left out {num_bad} of {num_good + num_bad} records of {source}")


def content_text(content: Any) -> str | None:
    """Returns the text of a message, which may come in parts; None if it is not text."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    is_text = isinstance(parts, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in parts
    )
    return "".join(part["text"] for part in parts) if is_text else None


def _in_file(file: Path) -> Iterator[Record]:
    with reading(file), file.open("rb") as opened:
        yield from _in_stream(opened, file)


def _in_stream(stream: BufferedReader, name: str | Path) -> Iterator[Record]:
    if not _ARRAY.match(stream.peek()):
        lines = enumerate(bounded_lines(stream, name), start=1)
        yield from (_parsed(f"{name}:{n}", line.rstrip()) for n, line in lines if line.strip())
        return
    array = _parsed(f"{name}:1", read_rest(stream, name, MAX_TEXT_BYTES))
    if array.problem:
        yield array
        return
    items = enumerate(array.value, start=1)
    yield from (Record(f"{name}, item {number},", item) for number, item in items)


def _parsed(place: str, content: bytes) -> Record:
    try:
        value = json.loads(content.decode("utf-8-sig"))
        if b"\\u" in content:  # JSON allows lone surrogates, UTF-8 does not: "?" replaces them
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
        return Record(place, value)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}"
        return Record(place, problem=f"is not JSON ({error.msg}: {at})")
    except (ValueError, RecursionError) as error:
        return Record(place, problem=f"is not JSON ({error})")


def _on_hub(name: str) -> Iterator[Record]:
    os.environ["HF_DATASETS_TRUST_REMOTE_CODE"] = "0"  # versions before 4 run a dataset's code
    try:
        if "://" in name:
            yield from _in_stream(BufferedReader(BytesIO(content_of(name))), name)
            return
        for number, row in enumerate(_rows(name), start=1):
            yield Record(f"{name}, row {number},", row)
    except ImportError as error:
        if error.name != "datasets":
            raise SpecjaxError(f"dataset {name} could not be read ({error})") from error
        raise SpecjaxError(
            f"{name} does not exist here, and reading it from the hub needs the package datasets; "
            "run `pip install datasets`, or check the path"
        ) from None
    except SpecjaxError:
        raise
    except Exception as error:  # the hub's network stack raises many types
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise SpecjaxError(
            f"dataset {name} could not be read ({reason}); check its name, or try again"
        ) from error


def _rows(name: str) -> Iterator[Any]:
    from datasets import load_dataset  # pyright: ignore[reportMissingImports]

    owner, configuration, split = f"{name}::".split(":", 2)
    more = [configuration] if configuration else []
    yield from load_dataset(owner, *more, split=split.rstrip(":") or "train", streaming=True)


def content_of(address: str) -> bytes:
    """Returns the file at an address; the hub's are cached."""
    if match := HUB_FILE.fullmatch(address):
        owner, revision, file = map(unquote, match.groups())
        path = hf_hub_download(owner, file, repo_type="dataset", revision=revision)
        return read_bytes(Path(path), MAX_TEXT_BYTES)
    with urlopen(address, timeout=60) as answer:
        return read_rest(answer, address, MAX_TEXT_BYTES)
