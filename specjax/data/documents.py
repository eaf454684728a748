"""Reads documents from files, folders and hub datasets, as token ids."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from huggingface_hub import hf_hub_download

from specjax.core.errors import SpecjaxError, warn
from specjax.core.files import (
    MAX_TEXT_BYTES,
    bounded_lines,
    expand_user,
    read_bytes,
    readable,
)

TEXT_KEYS = ("text", "content")  # of a line of .jsonl or a row of a hub dataset; the first wins
TURN_KEYS = ("messages", "conversations")  # the same, of a chat
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
# A hub id, which may go on with a configuration and a split; or the address of a JSON file.
DATASET_ID = re.compile(rf"(?!.*\.jsonl?$){HUB_ID.pattern}(:[\w.-]*)?(:[\w.-]+)?|https?://\S+")
HUB_FILE = re.compile(r"https://huggingface\.co/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
NUM_SHOWN = 3  # broken lines of a source that are named one by one
BATCH_CHARACTERS = 1_000_000  # tokenized in one call


def read_documents(sources: Sequence[str | Path], tokenizer: Any) -> Iterator[Sequence[int]]:
    """Yields the token ids of each document in `sources`, without special tokens around them.

    A source is a text file (one document), a `.jsonl` file (one document per line, under "text" or
    "content"), a folder (all such files in it, in sorted order, except hidden and binary ones), or
    the hub id of a dataset (its "train" split; needs the package `datasets`).

    Raises:
        SpecjaxError: at once if a source does not exist; on reaching it if a text cannot be read.
    """
    texts = chain.from_iterable([_texts_of(source) for source in sources])
    return _tokenize(texts, tokenizer)


def _tokenize(texts: Iterable[str], tokenizer: Any) -> Iterator[Sequence[int]]:
    for batch in _batches(texts):  # tokenizers spread a batch over the cores
        yield from tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _texts_of(source: str | Path) -> Iterator[str]:
    path = expand_user(source)
    if str(source) and path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if _is_text(file, path)]
        if not files:
            raise SpecjaxError(f"{path} has no text files; give a folder that has some")
        return chain.from_iterable(map(_texts_in, files))
    if str(source) and path.exists():
        return _texts_in(path)
    return _texts_from_hub(checked_hub_id(source))


def checked_hub_id(source: str | Path) -> str:
    """Returns `source` as what `hub_rows` reads; call it for what is neither file nor folder.

    Raises:
        SpecjaxError: if it cannot be a hub id.
    """
    if not DATASET_ID.fullmatch(str(source)):
        raise SpecjaxError(f"{source} does not exist and is not a hub id; check the path")
    return str(source)


def _is_text(file: Path, folder: Path) -> bool:
    is_hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    if is_hidden or not file.is_file():
        return False
    with reading(file), file.open("rb") as opened:
        return b"\0" not in opened.read(8192)


def _texts_in(file: Path) -> Iterator[str]:
    with reading(file), file.open("rb") as opened:
        if file.suffix != ".jsonl":
            yield read_bytes(file, MAX_TEXT_BYTES).decode("utf-8-sig")
            return
        lines = enumerate(bounded_lines(opened, file), start=1)
        lines = ((n, line) for n, line in lines if line.strip())
        yield from _valid(str(file), ((f"{file}:{n}", line) for n, line in lines))


def _valid(source: str, rows: Iterator[tuple[str, Any]]) -> Iterator[str]:
    """Yields the texts of rows; skips the others with a warning.

    Raises:
        SpecjaxError: if there are rows, but no text.
    """
    num_rows = num_skipped = 0
    for place, row in rows:
        num_rows += 1
        try:
            text = _text_of(json.loads(row) if isinstance(row, bytes) else row)
        except (ValueError, RecursionError) as error:
            num_skipped += 1
            if num_skipped <= NUM_SHOWN:
                reason = "" if isinstance(error, SpecjaxError) else "is not valid JSON: "
                warn(f"{place} {reason}{error}; skipping this line")
        else:
            yield text
    if num_rows and num_skipped == num_rows:
        raise SpecjaxError(f'{source} holds no text; write lines such as {{"text": "..."}}')
    if num_skipped:
        warn(f"Skipped {num_skipped} of {num_rows} lines of {source}.")


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turns a failure to read `file` as UTF-8 in the block into a SpecjaxError that names it."""
    try:
        with readable(file):
            yield
    except UnicodeDecodeError:
        raise SpecjaxError(f"{file} is not UTF-8 text; convert it or leave it out") from None


def _text_of(row: Any) -> str:
    """Returns the text of a row, or all that is said in a chat."""
    row = row if isinstance(row, dict) else {}
    turns = next((row[key] for key in TURN_KEYS if key in row), None)
    found = [row[key] for key in TEXT_KEYS if key in row][:1]
    if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
        found = [turn.get("content", turn.get("value")) for turn in turns]
    if not found or not all(isinstance(text, str) for text in found):
        keys = " or ".join(map(repr, (*TEXT_KEYS, TURN_KEYS[0])))
        raise SpecjaxError(f"has no text under {keys}")
    return whole_characters("\n\n".join(found))


def whole_characters(text: str) -> str:
    """Replaces lone surrogates, which JSON allows but UTF-8 does not, by question marks."""
    return text.encode("utf-8", "replace").decode()


def _texts_from_hub(name: str) -> Iterator[str]:
    rows = enumerate(hub_rows(name), start=1)
    return _valid(name, ((f"{name}, row {number},", row) for number, row in rows))


def hub_rows(name: str) -> Iterator[Any]:
    """Yields the rows of a hub dataset, streamed on demand, or of a JSON file on hub or web.

    Args:
        name: OWNER/NAME, OWNER/NAME:CONFIGURATION or OWNER/NAME:CONFIGURATION:SPLIT; the
            configuration may be empty, and the split is "train" by default. Or the address of a
            file with a JSON object per line or with a JSON list of objects; the hub's are cached.

    Raises:
        SpecjaxError: if the dataset cannot be read or the package `datasets` is not installed.
    """
    os.environ["HF_DATASETS_TRUST_REMOTE_CODE"] = "0"  # versions before 4 run a dataset's code
    try:
        if "://" in name:
            yield from _json_rows(content_of(name))
            return
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]

        owner, configuration, split = f"{name}::".split(":", 2)
        given = [configuration] if configuration else []
        yield from load_dataset(owner, *given, split=split.rstrip(":") or "train", streaming=True)
    except ImportError:
        raise SpecjaxError(
            f"{name} does not exist here, and reading it from the hub needs the package datasets; "
            "run `pip install datasets`, or check the path"
        ) from None
    except SpecjaxError:
        raise
    except Exception as error:  # the hub's network stack raises errors of its own
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise SpecjaxError(
            f"dataset {name} could not be read ({reason}); check its name, or try again"
        ) from error


def content_of(address: str) -> bytes:
    """Returns the file at an address; the hub's are cached."""
    if found := HUB_FILE.fullmatch(address):
        owner, revision, file = found.groups()
        path = hf_hub_download(owner, file, repo_type="dataset", revision=revision)
        return read_bytes(Path(path), MAX_TEXT_BYTES)
    with urlopen(address, timeout=60) as answer:
        content = answer.read(MAX_TEXT_BYTES + 1)
    if len(content) > MAX_TEXT_BYTES:
        raise SpecjaxError(
            f"{address} is larger than {MAX_TEXT_BYTES} bytes; download it and give a part"
        )
    return content


def _json_rows(content: bytes) -> Iterator[Any]:
    if content.lstrip()[:1] == b"[":
        yield from json.loads(content)
    else:
        yield from (json.loads(line) for line in content.splitlines() if line.strip())
