"""Generations one round at a time, with everything that passes between the parts of a round."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Key

from specjax.decoding import DraftTree, Engine, Params, Prompt, widths
from specjax.decoding.state import LoopState
from specjax.decoding.tree import Verification, ancestors
from tests.decoding.tiny import prompt

KEY = jax.random.key(2)


class Round(NamedTuple):
    before: LoopState
    tree: DraftTree  # as it was verified: rows that are done have the root alone
    proposed: Any  # the drafter's state after `propose`
    verification: Verification
    after: LoopState


def player(engine: Engine) -> Callable[[Params, LoopState], Round]:
    """Returns the program of one round."""

    @jax.jit
    def play(params: Params, state: LoopState) -> Round:
        proposed, proposal = engine.propose(params, state)
        output, verification, cache = engine.verify(params, proposed, proposal)
        after = replace(proposed, cache=cache)
        after = engine.commit(params, after, proposal.tree, output, verification)
        return Round(state, proposal.tree, proposed.drafter, verification, after)

    return play


def rounds_of(
    engine: Engine,
    params: Params,
    given: Prompt | None = None,
    key: Key[Array, ""] = KEY,
    verify: Callable | None = None,
) -> list[Round]:
    """Returns all rounds of a generation, and one more, in which every row is done.

    `verify` takes the place of the engine's own.
    """
    play, found = player(engine), []
    with pytest.MonkeyPatch.context() as patch:
        if verify is not None:
            patch.setattr(widths, "verify", verify)
        state = engine.prefill(params, given or prompt(), key)
        while not found or not found[-1].before.is_done.all():
            played = play(params, state)
            found.append(jax.device_get(played))
            state = played.after
    return found


def rows_of(tokens: Any, lengths: Any) -> list[list[int]]:
    """Returns each row's first tokens."""
    rows = zip(tokens.tolist(), lengths.tolist(), strict=True)
    return [row[:length] for row, length in rows]


def texts_of(state: LoopState) -> list[list[int]]:
    """Returns the committed text of each row."""
    return rows_of(state.tokens, state.length)


def some_path(tree, logits, draw, root_slot, max_depth) -> Verification:
    """Accepts a random number of tokens, those of the last valid node of that depth."""
    del logits, draw
    batch = len(root_slot)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(KEY, root_slot)
    wanted = jax.vmap(lambda key: jax.random.randint(key, (), 0, max_depth + 1))(keys)
    fits = tree.valid & (tree.depth <= wanted[:, None])
    deepest = jnp.max(jnp.where(fits, tree.depth, 0), axis=1)
    is_deepest = fits & (tree.depth == deepest[:, None])
    last = tree.num_nodes - 1 - jnp.argmax(is_deepest[:, ::-1], axis=1)
    above = jnp.take_along_axis(ancestors(tree, max_depth), last[:, None, None], axis=1)[:, 0]
    at = above[:, None] & (tree.depth[:, None] == jnp.arange(max_depth + 1)[None, :, None])
    bonus = (root_slot * 11 + jnp.arange(batch)) % 20
    return Verification(jnp.argmax(at, axis=2), deepest, bonus)


def proposals(engine: Engine, params: Params, states: list[LoopState]) -> list[DraftTree]:
    """Returns what is proposed in these states, in one program."""
    propose = jax.jit(lambda params, state: engine.propose(params, state)[1].tree)
    return [jax.device_get(propose(params, jax.tree.map(jnp.asarray, state))) for state in states]
