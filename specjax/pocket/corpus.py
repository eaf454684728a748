"""What the pocket model learns from: the standard library of the running Python.

Modules are split into training and held-out by a hash of their path, cut into pieces (functions,
methods, small classes), and packed into rows of tokens. Nothing is downloaded.
"""

import ast
import functools
import hashlib
import os
import random
import sysconfig
import textwrap
import tokenize
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specjax.pocket.edits import KINDS, EditTask, answer_text, make_edit, prompt_text
from specjax.pocket.tokenizer import BEGIN, BEGIN_ID, END, SPECIAL_TOKENS

HELD_OUT_FRACTION = 0.05
PIECE_LINES = (3, 40)  # fewest and most
PIECE_CHARACTERS = (80, 900)
OPENING_CHARACTERS = 900  # of a module that is to be continued
PROMPT_WEIGHT = 0.2
FIRST_SIGHT_WEIGHT = 0.1  # of text that a row shows for the first time, in a row of repeats
UNPREDICTABLE_START = 2  # how many tokens of a copy nothing foretells

_SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "lib-dynload", "__pycache__", "test", "tests", "idlelib",
    "lib2to3", "encodings", "pydoc_data", "turtledemo", "_bundled", "_vendor",
}  # fmt: skip
_LARGEST_MODULE = 400_000  # bytes: beyond it are generated tables

Row = tuple[list[int], list[float]]  # tokens, weights


def standard_library() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


@functools.cache
def module_paths() -> tuple[str, ...]:
    """Every usable module, as a sorted tuple of paths relative to the standard library."""
    root, found = standard_library(), []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [f for f in subfolders if f not in _SKIPPED_FOLDERS and "config-" not in f]
        for name in files:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                found.append((Path(folder) / name).relative_to(root).as_posix())
    return tuple(path for path in sorted(found) if _read_module(path) is not None)


def is_held_out(path: str) -> bool:
    """Whether a module belongs to the test set: a pure function of its relative path.

    So the split is the same on every machine, and a module keeps its side in every Python.
    """
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_FRACTION * 2**64


@functools.cache
def module_texts(held_out: bool) -> tuple[str, ...]:
    """The source of the held-out modules, or of the training modules, in order of path."""
    texts = (_read_module(path) for path in module_paths() if is_held_out(path) == held_out)
    return tuple(text for text in texts if text is not None)


@functools.cache
def pieces(held_out: bool) -> tuple[str, ...]:
    """The distinct pieces of one side of the split.

    A held-out piece that a training module has as well, word for word, is left out.
    """
    texts = module_texts(held_out)
    distinct = dict.fromkeys(piece for module in texts for piece in cut_pieces(module))
    known = set(pieces(False)) if held_out else set()
    return tuple(piece for piece in distinct if piece not in known)


def is_validation(text: str) -> bool:
    """Whether held-out text is for tuning (a quarter of it), and so not of the test set."""
    return hashlib.sha256(text.encode()).digest()[0] < 64


def held_out_openings(count: int, seed: int = 0, validation: bool = False) -> tuple[str, ...]:
    """The first lines of `count` held-out modules, to be continued freely."""
    texts = [text for text in module_texts(True) if len(text) > 2 * OPENING_CHARACTERS]
    texts = [text for text in texts if is_validation(text) == validation]
    chosen = random.Random(seed).sample(texts, min(count, len(texts)))
    return tuple(text[: text.rindex("\n", 0, OPENING_CHARACTERS) + 1] for text in chosen)


def cut_pieces(module: str) -> Iterator[str]:
    """Functions, methods (dedented) and small classes of a module, as source text.

    Comments and docstrings are kept. What stays is of moderate size (PIECE_LINES,
    PIECE_CHARACTERS) and parses on its own without a warning.
    """
    lines = module.split("\n")
    for node in ast.walk(_quiet_parse(module)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node.lineno] + [d.lineno for d in node.decorator_list])
            piece = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno])).rstrip()
            if _is_usable(piece):
                yield piece


def tokenizer_texts() -> Iterator[str]:
    """What the tokenizer is trained on: the training modules and a sample of edit instructions."""
    yield from module_texts(False)
    for index, piece in enumerate(pieces(False)):
        task = make_edit(KINDS[index % len(KINDS)], piece, random.Random(index))
        if task is not None:
            yield task.instruction


@dataclass(frozen=True, eq=False)
class TrainingData:
    """Rows of tokens, mixed from three ingredients, as a pure function of (seed, step).

    Nothing has to be saved to resume: step 1000 has the same rows whether or not step 999 was
    made. Build it with `TrainingData.build`.

    tokenizer:      turns texts into tokens
    pieces:         what edit tasks are made from, ordered by length
    piece_lengths:  int [pieces], in tokens
    code:           int [tokens], all modules one after another, each between BEGIN and END
    """

    tokenizer: Any
    pieces: tuple[str, ...]
    piece_lengths: np.ndarray
    code: np.ndarray
    seed: int = 0

    @classmethod
    def build(
        cls,
        tokenizer: Any,
        seed: int = 0,
        code_pieces: Sequence[str] | None = None,
        modules: Sequence[str] | None = None,
    ) -> "TrainingData":
        """Tokenise the pieces and modules once; by default all those of the training split.

        `tokenizer` is one of the `tokenizers` library, or a fast one of `transformers`.
        """
        tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        texts = list(pieces(False) if code_pieces is None else code_pieces)
        modules = module_texts(False) if modules is None else modules
        lengths = np.array([len(e.ids) for e in tokenizer.encode_batch(texts)])
        order = np.argsort(lengths, kind="stable")
        # The modules go one by one: the encodings of all at once would take much memory.
        code = [np.array(tokenizer.encode(BEGIN + m + END).ids, np.int32) for m in modules]
        ordered = tuple(texts[index] for index in order)
        return cls(tokenizer, ordered, lengths[order], np.concatenate(code), seed)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with nothing added."""
        return self.tokenizer.encode(text).ids

    def batch(
        self, step: int, batch_size: int, length: int, mixture: tuple[float, float, float]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens, int32 [batch_size length], and their loss weights, float32 [batch_size length].

        `mixture` is the share of rows of (repeats, edits, code). `weights[b, t]` is for the
        prediction of `tokens[b, t]`; nothing predicts the first token, so its weight is 0.
        """
        rng = np.random.default_rng((self.seed, step))
        limits = np.cumsum(mixture) / np.sum(mixture)
        marks = (np.arange(batch_size) + rng.random()) / batch_size  # shares hold in every batch
        kinds = np.searchsorted(limits, marks, side="right").clip(0, 2)
        edits = iter(self._edit_rows(rng, int(np.sum(kinds == 1)), length))
        makers: tuple[Callable[[], Row], ...] = (
            lambda: self._repeats_row(rng, length),
            lambda: next(edits),
            lambda: self._code_row(rng, length),
        )
        rows = [makers[kind]() for kind in kinds]
        tokens = np.array([row[0] for row in rows], np.int32)
        weights = np.array([row[1] for row in rows], np.float32)
        weights[:, 0] = 0
        return tokens, weights

    def _window(self, rng: np.random.Generator, length: int) -> list[int]:
        start = int(rng.integers(max(1, len(self.code) - length)))
        return np.resize(self.code[start : start + length], length).tolist()

    def _code_row(self, rng: np.random.Generator, length: int) -> Row:
        return [BEGIN_ID, *self._window(rng, length - 1)], [1.0] * length

    def _repeats_row(self, rng: np.random.Generator, length: int) -> Row:
        """Segments that come back after random gaps: only looking back can predict the copies."""
        tokens, weights = [BEGIN_ID], [0.0]
        segments: list[list[int]] = []
        while len(tokens) < length:
            if segments and rng.random() < 0.6:
                segment = segments[int(rng.integers(len(segments)))]
                weights += [0.0] * UNPREDICTABLE_START
                weights += [1.0] * (len(segment) - UNPREDICTABLE_START)
                tokens += segment
            else:
                segment_length, is_code = int(rng.integers(8, 65)), rng.random() < 0.5
                segments.append(self._segment(rng, segment_length, is_code))
                tokens += segments[-1]
                weights += [FIRST_SIGHT_WEIGHT if is_code else 0.0] * segment_length
            gap = int(rng.integers(0, 13))
            tokens += self._segment(rng, gap, is_code=False)
            weights += [0.0] * gap
        return tokens[:length], weights[:length]

    def _segment(self, rng: np.random.Generator, length: int, is_code: bool) -> list[int]:
        if is_code:
            return self._window(rng, length)
        vocabulary_size = self.tokenizer.get_vocab_size()
        return rng.integers(len(SPECIAL_TOKENS), vocabulary_size, length).tolist()

    def _edit_rows(self, rng: np.random.Generator, count: int, length: int) -> list[Row]:
        """Rows that begin with a task and hold as many whole ones as were expected to fit."""
        choice = random.Random(int(rng.integers(2**62)))
        tasks = [self._tasks_for_row(choice, length) for _ in range(count)]
        texts = [text(t) for row in tasks for t in row for text in (prompt_text, answer_text)]
        encoded = iter(self.tokenizer.encode_batch(texts))
        return [self._pack(rng, [next(encoded).ids for _ in range(2 * len(row))], length)
                for row in tasks]  # fmt: skip

    def _pack(self, rng: np.random.Generator, parts: list[list[int]], length: int) -> Row:
        tokens: list[int] = []
        weights: list[float] = []
        for index, ids in enumerate(parts):
            tokens += ids
            weights += [1.0 if index % 2 else PROMPT_WEIGHT] * len(ids)
        missing = max(0, length - len(tokens))
        tokens += self._window(rng, missing)
        return tokens[:length], (weights + [PROMPT_WEIGHT] * missing)[:length]

    def _tasks_for_row(self, rng: random.Random, length: int) -> list[EditTask]:
        """Tasks that should fit in `length` tokens, and one more for the end, to be cut off."""
        tasks, room = [], length
        while room > 0:
            # A task shows its piece twice, with some 40 tokens of instruction and marks.
            fitting = int(np.searchsorted(self.piece_lengths, (room - 40) / 2, side="right"))
            if fitting < min(len(self.pieces), 50):
                fitting, room = len(self.pieces), 0
            index, task = self._task(rng, fitting)
            tasks.append(task)
            room -= 2 * int(self.piece_lengths[index]) + 40
        return tasks

    def _task(self, rng: random.Random, fitting: int) -> tuple[int, EditTask]:
        """A task from one of the `fitting` shortest pieces; kinds are equally likely."""
        kind = rng.choice(KINDS)
        for attempt in range(200):
            index = rng.randrange(fitting)
            task = make_edit(kind, self.pieces[index], rng)
            if task is not None:
                return index, task
            if attempt % 20 == 19:
                kind = rng.choice(KINDS)
        raise ValueError("the pieces allow no edit task: give more or larger pieces.")


def _read_module(path: str) -> str | None:
    """The text of a module, or None if it is too large, does not decode or does not parse."""
    file = standard_library() / path
    try:
        if not 0 < file.stat().st_size <= _LARGEST_MODULE:
            return None
        with tokenize.open(file) as lines:
            text = lines.read()
        _quiet_parse(text)
    except (OSError, SyntaxError, ValueError):
        return None
    return text if _is_plain(text) else None


def _is_plain(text: str) -> bool:
    return not any(mark in text for mark in ("\f", "\r", "<|"))


def _is_usable(piece: str) -> bool:
    fits_lines = PIECE_LINES[0] <= piece.count("\n") + 1 <= PIECE_LINES[1]
    if not fits_lines or not PIECE_CHARACTERS[0] <= len(piece) <= PIECE_CHARACTERS[1]:
        return False
    if "\t" in piece or not _is_plain(piece):
        return False
    try:
        return len(_quiet_parse(piece, "error").body) == 1
    except (SyntaxError, ValueError):
        return False


def _quiet_parse(text: str, action: Any = "ignore") -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        return ast.parse(text)
