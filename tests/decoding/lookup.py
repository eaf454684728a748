"""Many short random texts, and what a drafter drafts after each."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.drafter import Context, Drafter, Params
from specjax.decoding.prompt import Prompt
from specjax.decoding.sampling import Draw, Sampling, row_keys
from specjax.decoding.tree import DraftTree
from specjax.models.target import ModelOutput

TEXTS, SLOTS, WIDTH = 600, 26, 4  # texts of at most SLOTS tokens, with states of size WIDTH


@cache
def texts() -> tuple[np.ndarray, np.ndarray]:
    """Random tokens from alphabets of 1 to 6, in the padding too, and lengths from 2 on."""
    numbers = np.random.default_rng(0)
    tokens = numbers.integers(0, 1 + np.arange(TEXTS)[:, None] % 6, (TEXTS, SLOTS))
    return tokens, numbers.integers(2, SLOTS + 1, TEXTS)


@partial(jax.jit, static_argnames="drafter")
def propose(drafter: Drafter, tokens, length, hidden=None, **known) -> DraftTree:
    """The tree of a first round after these texts, whose states are `hidden [B, S, D]`.

    `known` are fields of the drafter's state in place of what `init` gives them.
    """
    seen = None if hidden is None else hidden[:, :, None]
    prefill = ModelOutput(logits=None, hidden=seen)
    state = drafter.init(Params(None), Prompt(tokens, length), prefill, SLOTS + 3)
    state = replace(state, **known) if known else state
    draw = Draw(row_keys(jax.random.key(0), len(tokens)), length, Sampling())
    return drafter.propose(Params(None), state, Context(tokens, length), draw)[0].tree


def drafts(tree: DraftTree) -> list[list[int]]:
    """The drafted tokens of each row."""
    assert tree.is_chain
    counts = np.asarray(tree.num_valid())
    np.testing.assert_array_equal(tree.valid, np.arange(tree.num_nodes) < counts[:, None])
    rows = zip(np.asarray(tree.tokens), counts, strict=True)
    return [row[1:count].tolist() for row, count in rows]


def compare(drafter: Drafter, reading, hidden=None, **known):
    """The drafter must draft what `reading(text, states, *known)` says, in each random text."""
    tokens, length = texts()
    given = None if hidden is None else jnp.asarray(hidden)
    known = {name: jnp.asarray(value) for name, value in known.items()}
    tree = propose(drafter, jnp.asarray(tokens), jnp.asarray(length), given, **known)
    assert tree.num_nodes == drafter.num_nodes == drafter.max_depth + 1
    expected = []
    for row in range(TEXTS):
        text = tokens[row, : length[row]].tolist()
        assert tree.tokens[row, 0] == text[-1]
        states = None if hidden is None else hidden[row]
        expected.append(reading(text, states, *(value[row] for value in known.values())))
    assert drafts(tree) == expected
    assert 20 < sum(draft == [] for draft in expected) < TEXTS - 20
