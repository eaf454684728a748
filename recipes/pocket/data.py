"""Packs pocket's training data into rows of tokens: repeats, edit tasks and plain code."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recipes.pocket.edits import (
    BEGIN,
    END,
    KINDS,
    SPECIAL_TOKENS,
    EditTask,
    answer_text,
    make_edit,
    prompt_text,
)

PROMPT_WEIGHT = 0.2
FIRST_TIME_WEIGHT = 0.1  # in rows of repeats, of code that the row has not had yet
UNPREDICTABLE_START = 2  # tokens of a copy that nothing predicts

Row = tuple[list[int], list[float]]  # tokens, weights


@dataclass(frozen=True, eq=False)
class TrainingData:
    """Rows of tokens, mixed from three ingredients, as a pure function of (seed, step).

    So a resumed run needs no saved state. Make it with `TrainingData.build`.

    Attributes:
        tokenizer: of the `tokenizers` library.
        pieces: code that edit tasks are made from, ordered by length.
        piece_lengths: `[pieces]`, in tokens.
        code: `[tokens]`, all modules one after another, each between BEGIN and END.
        seed: decides the rows, together with the step.
    """

    tokenizer: Any
    pieces: tuple[str, ...]
    piece_lengths: np.ndarray
    code: np.ndarray
    seed: int

    @classmethod
    def build(
        cls, tokenizer: Any, seed: int, pieces: Sequence[str], modules: Sequence[str]
    ) -> "TrainingData":
        """Tokenises pieces and modules once."""
        texts = list(pieces)
        lengths = np.array([len(e.ids) for e in tokenizer.encode_batch(texts)])
        order = np.argsort(lengths, kind="stable")
        # One module at a time: the encodings of all at once would take much memory.
        code = [np.array(tokenizer.encode(BEGIN + m + END).ids, np.int32) for m in modules]
        ordered = tuple(texts[index] for index in order)
        return cls(tokenizer, ordered, lengths[order], np.concatenate(code), seed)

    def batch(
        self, step: int, batch_size: int, length: int, mixture: tuple[float, float, float]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens and their loss weights, int32 and float32 `[batch_size, length]`.

        `mixture` is the share of rows of (repeats, edits, code). `weights[b, t]` is for predicting
        `tokens[b, t]`; nothing predicts the first token, so its weight is 0.
        """
        rng = np.random.default_rng((self.seed, step))
        limits = np.cumsum(mixture) / np.sum(mixture)
        marks = (np.arange(batch_size) + rng.random()) / batch_size  # keeps shares in every batch
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

    # ---- Repeats and code ----------------------------------------------------------------------

    def _code_row(self, rng: np.random.Generator, length: int) -> Row:
        begin = SPECIAL_TOKENS.index(BEGIN)
        return [begin, *self._window(rng, length - 1)], [1.0] * length

    def _repeats_row(self, rng: np.random.Generator, length: int) -> Row:
        """Returns segments that recur after random gaps: only looking back predicts the copies."""
        tokens, weights = [SPECIAL_TOKENS.index(BEGIN)], [0.0]
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
                weights += [FIRST_TIME_WEIGHT if is_code else 0.0] * segment_length
            gap = int(rng.integers(0, 13))
            tokens += self._segment(rng, gap, is_code=False)
            weights += [0.0] * gap
        return tokens[:length], weights[:length]

    def _segment(self, rng: np.random.Generator, length: int, is_code: bool) -> list[int]:
        if is_code:
            return self._window(rng, length)
        vocab_size = self.tokenizer.get_vocab_size()
        return rng.integers(len(SPECIAL_TOKENS), vocab_size, length).tolist()

    # ---- Edit tasks ----------------------------------------------------------------------------

    def _edit_rows(self, rng: np.random.Generator, count: int, length: int) -> list[Row]:
        """Returns rows of whole tasks, as many as should fit, and a last one that is cut off."""
        choice = random.Random(int(rng.integers(2**62)))
        tasks = [self._tasks_for_row(choice, length) for _ in range(count)]
        texts = [text(t) for row in tasks for t in row for text in (prompt_text, answer_text)]
        encoded = iter(self.tokenizer.encode_batch(texts))
        rows = [[next(encoded).ids for _ in range(2 * len(row))] for row in tasks]
        return [self._pack(rng, parts, length) for parts in rows]

    def _pack(self, rng: np.random.Generator, parts: list[list[int]], length: int) -> Row:
        """Joins prompts and answers, which take turns, and fills the rest of the row with code."""
        tokens: list[int] = []
        weights: list[float] = []
        for index, ids in enumerate(parts):
            tokens += ids
            weights += [1.0 if index % 2 else PROMPT_WEIGHT] * len(ids)
        missing = max(0, length - len(tokens))
        tokens += self._window(rng, missing)
        return tokens[:length], (weights + [PROMPT_WEIGHT] * missing)[:length]

    def _tasks_for_row(self, rng: random.Random, length: int) -> list[EditTask]:
        tasks, room = [], length
        while room > 0:
            # A task shows its piece twice, with some 40 tokens of instruction and special tokens.
            fitting = int(np.searchsorted(self.piece_lengths, (room - 40) / 2, side="right"))
            if fitting < min(len(self.pieces), 50):
                fitting, room = len(self.pieces), 0
            index, task = self._task(rng, fitting)
            tasks.append(task)
            room -= 2 * int(self.piece_lengths[index]) + 40
        return tasks

    def _task(self, rng: random.Random, fitting: int) -> tuple[int, EditTask]:
        """Returns a task from one of the `fitting` shortest pieces; kinds are equally likely."""
        kind = rng.choice(KINDS)
        for attempt in range(200):
            index = rng.randrange(fitting)
            if (task := make_edit(kind, self.pieces[index], rng)) is not None:
                return index, task
            if attempt % 20 == 19:
                kind = rng.choice(KINDS)
        raise ValueError("the pieces allow no edit task; give more or longer pieces")
