"""Datastores for REST: the tokens of many documents, and a suffix array to search them with.

A folder holds `datastore.safetensors` (the arrays) and `datastore.json` (their sizes and sources).
Everything is NumPy; jax is imported only to save a datastore or move it to the device.
"""

import hashlib
import json
import shutil
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from specjax import __version__
from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user, read_bytes

SEPARATOR = -1  # follows every document; no query matches it, no draft crosses it
SORTED_TOKENS = 32  # suffixes are sorted by this many tokens: query plus continuation
MAX_TOKENS = 2**31 - 1 - 2 * SORTED_TOKENS  # int32 holds positions, some past the end included

ARRAYS, METADATA = "datastore.safetensors", "datastore.json"
FORMAT = "specjax datastore 1"
METADATA_KINDS = {
    "vocab_size": int,
    "fingerprint": str | None,
    "num_documents": int,
    "num_tokens": int,
    "sources": list,
    "specjax_version": str,
}

Document = Sequence[int] | np.ndarray  # token ids
Progress = Callable[[str, int, int | None], None]  # stage, done, total (None: unknown)


@dataclass(frozen=True, eq=False)
class Datastore:
    """Documents as token ids, a separator after each, and the positions of their sorted suffixes.

    Suffixes are sorted by their first `SORTED_TOKENS` tokens, then by position; those that start at
    a separator are left out.
    """

    tokens: Int32[np.ndarray, " T"] = field(repr=False)
    suffixes: Int32[np.ndarray, " M"] = field(repr=False)
    vocab_size: int
    fingerprint: str | None  # of the tokenizer; None if unknown
    num_documents: int
    sources: tuple[str, ...] = ()
    specjax_version: str = __version__

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all documents, without separators."""
        return len(self.suffixes)

    def check_tokenizer(self, fingerprint: str | None) -> None:
        """Raises SpecjaxError if both tokenizers are known and differ."""
        if None not in (self.fingerprint, fingerprint) and self.fingerprint != fingerprint:
            raise SpecjaxError(
                f"the datastore was built with tokenizer {self.fingerprint}, but the target's is "
                f"{fingerprint}; build a datastore with this target: `specjax datastore build`"
            )


def params(datastore: Datastore) -> dict[str, Any]:
    """Returns the params of `Retrieval` (`params.drafter`), on the default device."""
    import jax.numpy as jnp

    names = ("tokens", "suffixes")
    return {name: jnp.asarray(getattr(datastore, name)) for name in names}


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Returns a short hash of the whole vocabulary, added tokens included."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]


# ---- Build -------------------------------------------------------------------------------------


def build(
    documents: Iterable[Document],
    vocab_size: int,
    fingerprint: str | None = None,
    sources: Sequence[str | Path] = (),
    progress: Progress = lambda stage, done, total: None,
) -> Datastore:
    """Builds a datastore of `documents`, rows of ids below `vocab_size`; skips empty ones.

    `progress` is called with "reading" and the tokens so far, then "sorting" and the rounds done.

    Raises:
        SpecjaxError: if there are no tokens, too many for int32 positions, or invalid ids.
    """
    tokens = _concatenate(documents, vocab_size, progress)
    suffixes = _sorted_suffixes(tokens, progress)
    num_documents = len(tokens) - len(suffixes)
    names = tuple(str(source) for source in sources)
    return Datastore(tokens, suffixes, vocab_size, fingerprint, num_documents, names)


def _concatenate(
    documents: Iterable[Document], vocab_size: int, progress: Progress
) -> Int32[np.ndarray, " T"]:
    tokens = array("i")  # grows in place, so the text is in memory only once
    for number, document in enumerate(documents, start=1):
        if not len(document):
            continue
        if len(tokens) + len(document) + 1 > MAX_TOKENS:
            raise SpecjaxError(
                f"document {number} would take the datastore past its limit of {MAX_TOKENS} "
                "tokens; give less text"
            )
        tokens.frombytes(_ids_of(number, document, vocab_size).tobytes())
        tokens.append(SEPARATOR)
        progress("reading", len(tokens), None)
    if not tokens:
        raise SpecjaxError("there is no text to store; give a document that is not empty")
    return np.frombuffer(tokens, np.int32)


def _ids_of(number: int, document: Document, vocab_size: int) -> Int32[np.ndarray, " N"]:
    ids = np.asarray(document)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise SpecjaxError(f"document {number} is not a list of whole numbers; give token ids")
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise SpecjaxError(
            f"document {number} holds token id {wrong[0]}, outside the vocabulary of {vocab_size} "
            f"(0 to {vocab_size - 1}); tokenize it with the target's own tokenizer"
        )
    return ids.astype(np.int32)


def _sorted_suffixes(
    tokens: Int32[np.ndarray, " T"], progress: Progress
) -> Int32[np.ndarray, " M"]:
    """Returns the positions of all tokens but separators, sorted by the suffixes that start there.

    Prefix doubling: once suffixes are ranked by their first n tokens, the ranks of a suffix and of
    the one n tokens later rank it by 2 n tokens. Suffixes that are already unique are skipped.
    """
    order = np.arange(len(tokens), dtype=np.int32)
    rank = np.full(len(tokens) + SORTED_TOKENS, SEPARATOR, np.int32)  # the end sorts first
    rank[: len(tokens)] = tokens
    tied = order.copy()  # indices into `order` of suffixes that still equal another
    rounds = SORTED_TOKENS.bit_length() - 1
    for number in range(rounds):
        progress("sorting", number, rounds)
        tied = _refine(order, rank, tied, known=2**number)
    progress("sorting", rounds, rounds)
    by_position = np.sort(_pairs(rank[order[tied]], order[tied]))
    order[tied] = by_position & np.int64(2**32 - 1)
    return order[np.count_nonzero(tokens == SEPARATOR) :]  # separators sort before all ids


def _refine(
    order: Int32[np.ndarray, " T"],
    rank: Int32[np.ndarray, " R"],
    tied: Int32[np.ndarray, " N"],
    known: int,
) -> Int32[np.ndarray, " N2"]:
    """Sorts the tied suffixes by twice the `known` tokens, in place; returns those still tied."""
    starts = order[tied]
    keys = _pairs(rank[starts], rank[starts + np.int32(known)] + np.int32(1))
    sorting = np.argsort(keys)
    starts, keys = starts[sorting], keys[sorting]
    del sorting  # the largest array here
    order[tied] = starts
    is_first = np.ones(len(tied) + 1, bool)  # of its group of equals; the end counts as a group
    np.not_equal(keys[1:], keys[:-1], out=is_first[1:-1])
    group = np.cumsum(is_first[:-1], dtype=np.int32) - np.int32(1)
    # The rank is the index of the group's first suffix, so it stays valid when the group splits.
    rank[starts] = tied[is_first[:-1]][group]
    return tied[~(is_first[:-1] & is_first[1:])]


def _pairs(high: Int32[np.ndarray, " N"], low: Int32[np.ndarray, " N"]) -> np.ndarray:
    """Packs each pair into an int64 that sorts like the pair; `low` must not be negative."""
    keys = high.astype(np.int64)
    keys <<= 32
    keys |= low
    return keys


# ---- Save and load -----------------------------------------------------------------------------


def save(datastore: Datastore, folder: str | Path) -> None:
    """Writes a new `folder`, completely or not at all.

    Raises:
        SpecjaxError: if `folder` already holds something, or cannot be written.
    """
    from safetensors.numpy import save_file

    from specjax.core.files import new_folder

    values = {"format": FORMAT} | {name: getattr(datastore, name) for name in METADATA_KINDS}
    with new_folder(Path(folder)) as unfinished:
        arrays = {"tokens": datastore.tokens, "suffixes": datastore.suffixes}
        save_file(arrays, unfinished / ARRAYS)
        (unfinished / METADATA).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        # safetensors lets only the owner read its file.
        shutil.copymode(unfinished / METADATA, unfinished / ARRAYS)


def load_datastore(folder: str | Path) -> Datastore:
    """Reads a datastore that `save` wrote.

    Raises:
        SpecjaxError: if the folder is missing, damaged, or not a datastore.
    """
    from safetensors import SafetensorError, safe_open

    folder = expand_user(folder)
    values = _read_metadata(folder / METADATA)
    num_tokens, arrays = values.pop("num_tokens"), {}
    try:
        with safe_open(folder / ARRAYS, framework="numpy") as file:
            if not (wrong := _header_error(file, num_tokens, values["num_documents"])):
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                wrong = _contradiction(arrays, num_tokens, values)
    except (SafetensorError, OSError, MemoryError) as error:
        wrong = str(error)
    if wrong:
        raise SpecjaxError(
            f"{folder / ARRAYS} is damaged or does not match {METADATA} ({wrong}); copy or build "
            "the datastore again"
        )
    return Datastore(**arrays, **values)


def _read_metadata(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(read_bytes(file))
    except OSError:
        raise SpecjaxError(
            f"{file.parent} is not a datastore: it has no {file.name}; check the path or build one "
            "with `specjax datastore build`"
        ) from None
    except (ValueError, RecursionError):
        values = None
    if (
        not isinstance(values, dict)
        or values.get("format") != FORMAT
        or not all(isinstance(values.get(name), kind) for name, kind in METADATA_KINDS.items())
    ):
        raise SpecjaxError(
            f"{file} is damaged or does not describe a {FORMAT!r}; copy or build the datastore "
            "again"
        )
    kept = {name: values[name] for name in METADATA_KINDS}
    return kept | {"sources": tuple(map(str, kept["sources"]))}


def _header_error(file: Any, num_tokens: int, num_documents: int) -> str:
    """Returns how the header of the arrays contradicts the metadata; nothing is allocated yet."""
    length = num_tokens + num_documents
    expected = {"tokens": ("I32", [length]), "suffixes": ("I32", [num_tokens])}
    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    found = {name: (each.get_dtype(), each.get_shape()) for name, each in slices.items()}
    if found != expected or not 0 < num_tokens <= length <= MAX_TOKENS:
        return f"arrays are {found}, expected {expected}"
    return ""


def _contradiction(
    arrays: Mapping[str, np.ndarray], num_tokens: int, values: Mapping[str, Any]
) -> str:
    """Returns how the values of the arrays contradict the metadata; empty if they agree."""
    length = num_tokens + values["num_documents"]
    tokens, suffixes = arrays["tokens"], arrays["suffixes"]
    if np.count_nonzero(tokens == SEPARATOR) != values["num_documents"] or tokens[-1] >= 0:
        return f"it does not hold {values['num_documents']} documents"
    ranges = ((tokens, SEPARATOR, values["vocab_size"]), (suffixes, 0, length))
    for found, low, high in ranges:
        if found.min() < low or found.max() >= high:
            return f"values from {found.min()} to {found.max()} are outside {low} to {high - 1}"
    return ""
