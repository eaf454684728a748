"""Keeps the target's hidden states of texts in a folder, for all epochs, and runs, that read them.

They take the place of the target's pass in every step, as in EAGLE's released code. A text is read
alone, so that the bits do not depend on how texts are packed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.core.files import new_folder, readable
from specjax.models.fingerprint import FrozenModel
from specjax.models.target import Target
from specjax.training.checkpoints import checksum
from specjax.training.data import padded_batch
from specjax.training.examples import Example
from specjax.training.objectives.base import hidden_states

BATCH = 8  # texts read at a time
STEP = 256  # texts are padded to multiples of it, so that few programs are compiled
FILE = "hidden_states"


def with_hidden_states(
    examples: Sequence[Example],
    target: FrozenModel,
    layers: tuple[int, ...],
    folder: Path,
    watch: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> list[Example]:
    """Returns the examples with the target's hidden states, after some of its layers.

    `folder` keeps them, in the target's dtype, for other runs on the same texts; `watch` sees how
    they are computed. Raises SpecjaxError where they cannot be written or read.
    """
    tokens = [example.tokens for example in examples]
    dtype = np.dtype(target.model.dtype(target.params))
    key = checksum((target.params, np.asarray(layers), tokens)), len(tokens), dtype.name
    kept, order = folder / "-".join(map(str, key)), np.argsort([*map(len, tokens)], kind="stable")
    if not kept.exists():
        with new_folder(kept) as unfinished, (unfinished / FILE).open("wb") as file:
            for first in watch(range(0, len(order), BATCH)):
                chosen = [examples[number] for number in order[first : first + BATCH]]
                length = -(-len(chosen[-1].tokens) // STEP) * STEP
                batch = padded_batch(chosen, BATCH, length)
                places = (batch[name] for name in ("tokens", "positions", "segments"))
                states = _read(target.params, *places, model=target.model, layers=layers)
                for example, rows in zip(chosen, np.asarray(states), strict=False):
                    file.write(rows[: len(example.tokens)].tobytes())
    width = len(layers) * target.model.config.hidden_size
    with readable(kept / FILE):
        states = np.memmap(kept / FILE, dtype, "r").reshape(-1, width)
    ends = np.cumsum([len(tokens[number]) for number in order])
    rows = dict(zip(order.tolist(), np.split(states, ends[:-1]), strict=True))
    return [replace(example, hidden=rows[number]) for number, example in enumerate(examples)]


@partial(jax.jit, static_argnames=("model", "layers"))
def _read(
    params: Any,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    *,
    model: Target,
    layers: tuple[int, ...],
) -> Float[Array, "B T F"]:
    """Returns the hidden states side by side."""
    states = hidden_states(model, params, layers, tokens, positions, segments)
    return states.reshape(*tokens.shape, -1)
