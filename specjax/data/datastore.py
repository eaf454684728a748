"""Datastores for REST: the tokens of many documents, and a suffix array to search them with.

A folder holds `datastore.safetensors` (the arrays) and `datastore.json` (their sizes and sources).
Everything is NumPy; jax is imported only to save a datastore or move it to the device.
"""

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from specjax import __version__
from specjax.core.errors import SpecjaxError, check_ids
from specjax.core.files import expand_user, read_json, save_arrays
from specjax.core.settings import declared_fields, setting

SEPARATOR = -1  # follows every document; no query matches it, no draft crosses it
SORTED_TOKENS = 32  # suffixes are sorted by this many tokens: query plus continuation
MAX_TOKENS = 2**31 - 1 - 2 * SORTED_TOKENS  # int32 holds positions, some past the end included

ARRAYS, METADATA = "datastore.safetensors", "datastore.json"
FORMAT = "specjax datastore 1"
Document = Sequence[int] | np.ndarray  # token ids
Watch = Callable[..., Iterable[Any]]  # (steps, what they do, count) -> the same steps


@dataclass(frozen=True)
class Metadata:
    """The contents of `datastore.json`."""

    vocab_size: int
    fingerprint: str | None  # of the tokenizer; None if unknown
    num_documents: int = setting(at_least=1)
    num_tokens: int = setting(at_least=1, at_most=MAX_TOKENS)  # without separators
    sources: tuple[str, ...] = ()
    specjax_version: str = __version__
    format: str = setting(FORMAT, choices=(FORMAT,))


@dataclass(frozen=True, eq=False)
class Datastore:
    """Documents as token ids, a separator after each, and the positions of their sorted suffixes.

    Suffixes are sorted by their first `SORTED_TOKENS` tokens, then by position; those that start at
    a separator are left out.
    """

    tokens: Int32[np.ndarray, " T"] = field(repr=False)
    suffixes: Int32[np.ndarray, " M"] = field(repr=False)
    metadata: Metadata

    def check_tokenizer(self, fingerprint: str | None) -> None:
        """Raises SpecjaxError if both tokenizers are known and differ."""
        built_with = self.metadata.fingerprint
        if None not in (built_with, fingerprint) and built_with != fingerprint:
            raise SpecjaxError(
                f"the datastore was built with tokenizer {built_with}, but the target's is "
                f"{fingerprint}; build a datastore with this target: `specjax datastore build`"
            )


def params(datastore: Datastore) -> dict[str, Any]:
    """Returns the params of `Retrieval` (`params.drafter`), on the default device."""
    import jax.numpy as jnp

    return {name: jnp.asarray(getattr(datastore, name)) for name in ("tokens", "suffixes")}


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
    watch: Watch = lambda steps, doing, count=None: steps,
) -> Datastore:
    """Builds a datastore of `documents`, rows of ids below `vocab_size`; skips empty ones.

    `watch` shows the progress of reading documents, then of sorting suffixes.
    """
    tokens = _concatenate(watch(documents, "Reading documents"), vocab_size)
    suffixes = _sorted_suffixes(tokens, watch)
    num_documents, names = len(tokens) - len(suffixes), tuple(map(str, sources))
    about = Metadata(vocab_size, fingerprint, num_documents, len(suffixes), names)
    return Datastore(tokens, suffixes, about)


def _concatenate(documents: Iterable[Document], vocab_size: int) -> Int32[np.ndarray, " T"]:
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
    if not tokens:
        raise SpecjaxError("there is no text to store; give a document that is not empty")
    return np.frombuffer(tokens, np.int32)


def _ids_of(number: int, document: Document, vocab_size: int) -> Int32[np.ndarray, " N"]:
    ids = np.asarray(document)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise SpecjaxError(f"document {number} is not a list of whole numbers; give token ids")
    check_ids(f"document {number}", ids, vocab_size)
    return ids.astype(np.int32)


def _sorted_suffixes(tokens: Int32[np.ndarray, " T"], watch: Watch) -> Int32[np.ndarray, " M"]:
    """Returns the positions of all tokens but separators, sorted by the suffixes that start there.

    Prefix doubling: once suffixes are ranked by their first n tokens, the ranks of a suffix and of
    the one n tokens later rank it by 2 n tokens. Suffixes that are already unique are skipped.
    """
    order = np.arange(len(tokens), dtype=np.int32)
    rank = np.full(len(tokens) + SORTED_TOKENS, SEPARATOR, np.int32)  # the end sorts first
    rank[: len(tokens)] = tokens
    tied = order.copy()  # indices into `order` of suffixes that still equal another
    rounds = SORTED_TOKENS.bit_length() - 1
    for number in watch(range(rounds), "Sorting suffixes", rounds):
        tied = _refine(order, rank, tied, num_ranked=2**number)
    by_position = np.sort(_pairs(rank[order[tied]], order[tied]))
    order[tied] = by_position & np.int64(2**32 - 1)
    return order[np.count_nonzero(tokens == SEPARATOR) :]  # separators sort before all ids


def _refine(
    order: Int32[np.ndarray, " T"],
    rank: Int32[np.ndarray, " R"],
    tied: Int32[np.ndarray, " N"],
    num_ranked: int,
) -> Int32[np.ndarray, " N2"]:
    """Sorts the tied suffixes by twice `num_ranked` tokens, in place; returns those still tied."""
    starts = order[tied]
    keys = _pairs(rank[starts], rank[starts + np.int32(num_ranked)] + np.int32(1))
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
    """Writes a new `folder`, completely or not at all."""
    arrays = {"tokens": datastore.tokens, "suffixes": datastore.suffixes}
    save_arrays(Path(folder), "datastore", arrays, asdict(datastore.metadata))


def load_datastore(folder: str | Path) -> Datastore:
    """Reads a datastore that `save` wrote."""
    from safetensors import SafetensorError, safe_open

    folder = expand_user(folder)
    about = _read_metadata(folder / METADATA)
    try:
        with safe_open(folder / ARRAYS, framework="numpy") as file:
            _check_header(file, about)
            arrays = {name: file.get_tensor(name) for name in ("tokens", "suffixes")}
        _check_arrays(**arrays, about=about)
    except (SpecjaxError, SafetensorError, OSError, MemoryError) as error:
        raise SpecjaxError(
            f"{folder / ARRAYS} is damaged or does not match {METADATA} ({error}); copy or build "
            "the datastore again"
        ) from None
    return Datastore(**arrays, metadata=about)


def _read_metadata(file: Path) -> Metadata:
    if not file.is_file():
        raise SpecjaxError(
            f"{file.parent} is not a datastore: it has no {file.name}; check the path or build one "
            "with `specjax datastore build`"
        )
    values = read_json(file)
    try:
        return Metadata(**declared_fields(Metadata, values))
    except (SpecjaxError, TypeError, KeyError) as error:
        raise SpecjaxError(
            f"{file} is damaged or does not describe a {FORMAT!r} ({error}); copy or build the "
            "datastore again"
        ) from None


def _check_header(file: Any, about: Metadata) -> None:
    """Raises SpecjaxError if the arrays' header contradicts the metadata; allocates nothing."""
    length = about.num_tokens + about.num_documents
    expected = {"tokens": ("I32", [length]), "suffixes": ("I32", [about.num_tokens])}
    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    stored = {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
    if stored != expected:
        raise SpecjaxError(f"arrays are {stored}, expected {expected}")


def _check_arrays(tokens: np.ndarray, suffixes: np.ndarray, about: Metadata) -> None:
    """Raises SpecjaxError if the arrays contradict the metadata."""
    num_documents = about.num_documents
    if np.count_nonzero(tokens == SEPARATOR) != num_documents or tokens[-1] >= 0:
        raise SpecjaxError(f"it does not hold {num_documents} documents")
    for values, low, high in ((tokens, SEPARATOR, about.vocab_size), (suffixes, 0, len(tokens))):
        least, most = values.min(), values.max()
        if least < low or most >= high:
            raise SpecjaxError(f"values from {least} to {most} are outside {low} to {high - 1}")
