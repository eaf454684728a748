"""The code that pocket learns from and is measured on: the standard library of the running Python.

A hash of its path puts each module on the training side or the held-out side. The code is cut into
pieces (functions, methods, small classes), from which edit tasks are made.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recipes.pocket.edits import KINDS, EditTask, make_edit
from specjax import SpecjaxError

HELD_OUT_FRACTION = 0.05
PIECE_LINES = (3, 40)  # minimum and maximum
PIECE_CHARACTERS = (80, 900)
OPENING_CHARACTERS = 900  # of a module that is to be continued
CONVERSATION_CHARACTERS = 1500  # of plain code, at most
EDIT_SHARE = 0.8  # of conversations

_SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "lib-dynload", "__pycache__", "test", "tests", "idlelib",
    "lib2to3", "encodings", "pydoc_data", "turtledemo", "_bundled", "_vendor",
}  # fmt: skip
_MAX_MODULE_BYTES = 400_000  # larger ones are generated tables


# ---- Modules and pieces ------------------------------------------------------------------------


def standard_library() -> Path:
    """Returns the folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


@functools.cache
def module_paths() -> tuple[str, ...]:
    """Returns every usable module, as a sorted tuple of paths relative to the standard library."""
    root, paths = standard_library(), []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [f for f in subfolders if f not in _SKIPPED_FOLDERS and "config-" not in f]
        for name in files:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                paths.append((Path(folder) / name).relative_to(root).as_posix())
    return tuple(path for path in sorted(paths) if _read_module(path) is not None)


def is_held_out(path: str) -> bool:
    """Returns whether a module is held out.

    The relative path alone decides, so a module keeps its side on every machine and in every
    Python.
    """
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_FRACTION * 2**64


def is_validation(text: str) -> bool:
    """Returns whether held-out text is for tuning (a quarter of it) instead of the test set."""
    return hashlib.sha256(text.encode()).digest()[0] < 64


@functools.cache
def module_texts(*, held_out: bool) -> tuple[str, ...]:
    """Returns the source of the held-out modules, or of the training modules, ordered by path."""
    texts = (_read_module(path) for path in module_paths() if is_held_out(path) == held_out)
    return tuple(text for text in texts if text is not None)


@functools.cache
def pieces(*, held_out: bool) -> tuple[str, ...]:
    """Returns the distinct pieces of one side; held-out ones that training has too are left out."""
    texts = module_texts(held_out=held_out)
    distinct = dict.fromkeys(piece for module in texts for piece in cut_pieces(module))
    training = set(pieces(held_out=False)) if held_out else set()
    return tuple(piece for piece in distinct if piece not in training)


def cut_pieces(module: str) -> Iterator[str]:
    """Yields functions, methods (dedented) and small classes of a module, as source text.

    Comments and docstrings stay. Pieces are within `PIECE_LINES` and `PIECE_CHARACTERS`, and each
    parses on its own without a warning.
    """
    lines = module.split("\n")
    for node in ast.walk(_quiet_parse(module)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node.lineno] + [d.lineno for d in node.decorator_list])
            piece = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno])).rstrip()
            if _is_usable(piece):
                yield piece


@functools.cache
def _read_module(path: str) -> str | None:
    """Returns the text of a module; None if it is too large, or does not decode or parse."""
    file = standard_library() / path
    try:
        if not 0 < file.stat().st_size <= _MAX_MODULE_BYTES:
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


# ---- Held-out tasks ----------------------------------------------------------------------------


def held_out_openings(count: int, validation: bool = False) -> tuple[str, ...]:
    """Returns the first lines of `count` held-out modules, to be continued freely."""
    texts = [text for text in module_texts(held_out=True) if len(text) > 2 * OPENING_CHARACTERS]
    texts = [text for text in texts if is_validation(text) == validation]
    chosen = random.Random(0).sample(texts, min(count, len(texts)))
    return tuple(text[: text.rindex("\n", 0, OPENING_CHARACTERS) + 1] for text in chosen)


def held_out_tasks(
    count: int,
    seed: int = 0,
    kinds: Sequence[str] = KINDS,
    max_characters: int = 600,
    validation: bool = False,
) -> tuple[EditTask, ...]:
    """Returns `count` edit tasks from held-out modules: of the test set, or those for tuning.

    The kinds take turns. No piece is longer than `max_characters`, and none is used twice as long
    as there are fresh ones that allow the kind.
    """
    rng = random.Random(seed)
    short = [piece for piece in pieces(held_out=True) if len(piece) <= max_characters]
    allowed = [piece for piece in short if is_validation(piece) == validation]
    rng.shuffle(allowed)
    fresh, tasks = list(allowed), []
    for index in range(count):
        kind = kinds[index % len(kinds)]
        for piece in (*fresh, *allowed):
            if (task := make_edit(kind, piece, rng)) is not None:
                break
        else:
            raise SpecjaxError(
                f"no held-out piece of up to {max_characters} characters allows the edit {kind!r}; "
                "raise max_characters"
            )
        fresh = [other for other in fresh if other != piece]
        tasks.append(task)
        allowed = allowed[1:] + allowed[:1]  # so that reused pieces differ from task to task
    return tuple(tasks)


# ---- Conversations for training ----------------------------------------------------------------


def conversation_records(count: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """Yields `count` conversations of the training side, for drafters to learn from.

    The seed and its number decide each of them. `EDIT_SHARE` of them are edit tasks with the
    message that pocket was trained on; the rest is plain code.
    """
    allowed = pieces(held_out=False)
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        if rng.random() < EDIT_SHARE:
            task = _edit(allowed, rng)
            yield {"prompt": task.message, "response": task.result}
        else:
            yield {"text": _code(rng)}


def _edit(pieces: Sequence[str], rng: random.Random) -> EditTask:
    """Returns a task of any kind, all equally likely, from a piece that allows it."""
    kind = rng.choice(KINDS)
    while True:
        if (task := make_edit(kind, rng.choice(pieces), rng)) is not None:
            return task


def _code(rng: random.Random) -> str:
    """Returns some lines of a module, which is the likelier the longer it is."""
    modules = module_texts(held_out=False)
    [text] = rng.choices(modules, weights=list(map(len, modules)))
    start = rng.randrange(max(1, len(text) - CONVERSATION_CHARACTERS))
    start = text.rfind("\n", 0, start) + 1
    return text[start : start + CONVERSATION_CHARACTERS]
