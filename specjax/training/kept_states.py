"""Keeps the target's hidden states on disk, for every epoch and run over the same texts.

They take the place of the target's pass in every step, as in EAGLE's released code. Texts are
looked up by their tokens, so runs over different texts can share a folder.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from uuid import uuid4

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float

from specjax.core.errors import SpecjaxError
from specjax.core.files import new_folder, read_json, readable
from specjax.models.fingerprint import FrozenModel
from specjax.training.checkpoints import checksum
from specjax.training.data import padded_batch
from specjax.training.examples import Example
from specjax.training.objectives.base import hidden_states

BATCH, PART = 8, 1024  # texts read at a time, and kept at a time
STEP = 256  # texts are padded to multiples of it, so that few programs are compiled
STATES, SIZES = "hidden_states", "texts.json"  # the files of a part


def with_hidden_states(
    examples: Sequence[Example],
    target: FrozenModel,
    layers: tuple[int, ...],
    folder: Path,
    watch: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> list[Example]:
    """Returns the examples with the target's hidden states, after some of its layers.

    `folder` keeps them, in the target's dtype; `watch` wraps the batches still to be computed, to
    show progress. Raises SpecjaxError if the folder cannot be written, or holds a damaged file.
    """
    dtype, width = target.model.dtype(target.params), len(layers) * target.model.config.hidden_size
    about = repr((target.model.config, layers, checksum(target.params), np.dtype(dtype).name))
    parts = folder / sha256(about.encode()).hexdigest()[:16]
    names = [sha256(example.tokens.tobytes()).hexdigest() for example in examples]
    kept = _kept(parts, dtype, width)
    missing = {n: text for n, text in zip(names, examples, strict=True) if n not in kept}
    if missing:
        order = sorted(missing, key=lambda name: len(missing[name].tokens))
        batches = iter(watch(range(0, len(order), BATCH)))
        for start in range(0, len(order), PART):
            with new_folder(parts / uuid4().hex) as part, (part / STATES).open("wb") as file:
                for first in islice(batches, PART // BATCH):
                    chosen = [missing[name] for name in order[first : first + BATCH]]
                    for example, states in zip(chosen, _read(chosen, target, layers), strict=False):
                        file.write(states[: len(example.tokens)].tobytes())
                sizes = {name: len(missing[name].tokens) for name in order[start : start + PART]}
                (part / SIZES).write_text(json.dumps(sizes), encoding="utf-8")
        kept = _kept(parts, dtype, width)
    return [replace(text, hidden=kept[n]) for n, text in zip(names, examples, strict=True)]


def _kept(parts: Path, dtype: DTypeLike, width: int) -> dict[str, Float[np.ndarray, "T F"]]:
    """Returns the states of all texts in a folder of parts, by the checksums of their tokens."""
    kept = {}
    for part in sorted(parts.glob("[!.]*")):
        sizes = read_json(part / SIZES)
        are_sizes = all(type(size) is int and size >= 0 for size in sizes.values())
        ends = np.cumsum([*sizes.values()]) if are_sizes else np.empty(0, int)
        with readable(part / STATES):
            size = (part / STATES).stat().st_size
            if not len(ends) or size != ends[-1] * width * np.dtype(dtype).itemsize:
                raise SpecjaxError(f"{part} is damaged; delete it, and the next run makes it again")
            states = np.memmap(part / STATES, dtype, "r")
        kept |= dict(zip(sizes, np.split(states.reshape(-1, width), ends[:-1]), strict=True))
    return kept


_states = jax.jit(hidden_states, static_argnames=("target", "layers"))


def _read(
    examples: Sequence[Example], target: FrozenModel, layers: tuple[int, ...]
) -> Float[np.ndarray, "B T F"]:
    """Returns the hidden states side by side, of a batch padded to a multiple of `STEP` tokens."""
    length = -(-max(len(example.tokens) for example in examples) // STEP) * STEP
    batch = padded_batch(examples, BATCH, length)
    places = (batch[name] for name in ("tokens", "positions", "segments"))
    states = _states(target.model, target.params, layers, *places)
    return np.asarray(states, target.model.dtype(target.params)).reshape(BATCH, length, -1)
