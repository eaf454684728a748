"""Reads documents from files, folders and hub datasets, as token ids."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from os.path import isdir, isfile
from pathlib import Path
from typing import Any

from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user, read_text, reading
from specjax.data.records import TURN_KEYS, content_text, good_records, read_records

TEXT_KEYS = ("text", "content")  # of a record; the first wins
BATCH_CHARACTERS = 1_000_000  # tokenized in one call


def read_documents(sources: Sequence[str | Path], tokenizer: Any) -> Iterator[Sequence[int]]:
    """Yields the token ids of each document in `sources`, without special tokens around them.

    A source is a text file (one document), a `.jsonl` file (one document per line, under "text" or
    "content", or a chat), a folder (all such files in it, in sorted order, except hidden and binary
    ones), or an address or hub dataset of such records, as in `read_records`.
    """
    texts = chain.from_iterable([_texts_of(source) for source in sources])
    return chain.from_iterable(  # tokenizers spread a batch over the cores
        tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
        for batch in _batches(texts)
    )


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
    if str(source) and isdir(path):
        files = [file for file in sorted(path.rglob("*")) if _is_text(file, path)]
        if not files:
            raise SpecjaxError(f"{path} has no text files; give a folder that has some")
        return chain.from_iterable(map(_texts_of, files))
    if isfile(path) and path.suffix != ".jsonl":
        return map(read_text, [path])
    expected = 'text; write lines such as {"text": "..."}'
    return good_records(source, read_records(source), _text_of, expected)


def _is_text(file: Path, folder: Path) -> bool:
    is_hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    if is_hidden or not file.is_file():
        return False
    with reading(file), file.open("rb") as opened:
        start = opened.read(8192)
    return start != b"" and b"\0" not in start


def _text_of(record: Any) -> str:
    """Returns the text of a record, or that of all turns of a chat."""
    record = _given(record) if isinstance(record, dict) else {}
    turns = next((record[key] for key in TURN_KEYS if key in record), None)
    contents = [record[key] for key in TEXT_KEYS if key in record][:1]
    if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
        contents = [turn.get("content", turn.get("value")) for turn in map(_given, turns)]
    texts = [text for text in map(content_text, contents) if text is not None]
    if not texts or len(texts) < len(contents):
        keys = " or ".join(map(repr, (*TEXT_KEYS, *TURN_KEYS)))
        raise SpecjaxError(f"has no text under {keys}")
    return "\n\n".join(texts)


def _given(values: dict[str, Any]) -> dict[str, Any]:
    """Drops null, which data sets have for fields of other records."""
    return {key: value for key, value in values.items() if value is not None}
