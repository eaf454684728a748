"""Ranks of a text's tokens against trees that hold all tokens, drafted place by place."""

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.drafter import Context, Params
from specjax.decoding.drafters.hydra import Hydra, HydraSettings
from specjax.decoding.drafters.medusa import Medusa, MedusaSettings
from specjax.decoding.drafters.parallel_spec import ParallelSettings, ParallelSpec
from specjax.decoding.generate import start_loop
from specjax.decoding.prompt import from_ids
from specjax.decoding.sampling import Draw, Sampling
from specjax.decoding.tree import DraftTree
from specjax.tuning.head_ranks import answer_ranks, rank_of
from tests.decoding.hydra_heads import hydra_head
from tests.decoding.medusa_heads import medusa_head
from tests.decoding.parallel_heads import parallel_head
from tests.decoding.tiny import target

VOCAB, DEPTHS = 5, 3
ALL = tuple(path for n in range(1, DEPTHS + 1) for path in product(range(VOCAB), repeat=n))
NUMBERS = np.random.default_rng(4)
TEXTS = [(NUMBERS.integers(0, VOCAB, length).tolist(), 6) for length in (19, 11)]
KINDS = {
    "medusa": (Medusa, medusa_head(VOCAB), MedusaSettings(ALL)),
    "hydra": (Hydra, hydra_head(True, VOCAB), HydraSettings(ALL)),
    "parallel-eagle": (ParallelSpec, parallel_head(True, VOCAB), ParallelSettings(ALL)),
    "parallel-medusa": (ParallelSpec, parallel_head(False, VOCAB), ParallelSettings(ALL)),
}


def drafted(drafter: Any, params: Params, prompts: list[list[int]]) -> DraftTree:
    """The trees that are drafted when the last token of each prompt is the root."""
    model, _ = target(VOCAB)
    given = from_ids(prompts, bucket=32)
    state = start_loop(
        params, given, jax.random.key(0), target=model, drafter=drafter, max_new_tokens=4
    )
    draw = Draw(state.row_keys, state.length, Sampling())
    context = Context(state.tokens, state.length)
    propose = jax.jit(lambda state: drafter.propose(params, state, context, draw)[0].tree)
    return propose(state.drafter)


def ranks_below(tree: DraftTree, row: int, wanted: list[int]) -> list[int]:
    """The rank of each wanted token among its siblings, the ones before it being accepted."""
    tokens, parents = np.asarray(tree.tokens[row]), np.asarray(tree.parents[row])
    here, found = 0, []
    for token in wanted:
        children = np.flatnonzero(parents == here)
        assert sorted(tokens[children]) == list(range(VOCAB))
        found.append(tokens[children].tolist().index(token))
        here = children[found[-1]]
    return found + [-1] * (DEPTHS - len(wanted))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_are_those_of_drafted_trees(kind):
    make, (head, weights), settings = KINDS[kind]
    model, params = target(VOCAB)
    found = answer_ranks(TEXTS, head, weights, model, params)[:, :DEPTHS]
    places = [(text, at) for text, start in TEXTS for at in range(start, len(text))]
    assert len(found) == len(places)
    prompts = [text[:at] for text, at in places]
    tree = drafted(make(head, model, settings), Params(params, weights), prompts)
    expected = [
        ranks_below(tree, row, text[at : at + DEPTHS]) for row, (text, at) in enumerate(places)
    ]
    np.testing.assert_array_equal(found, expected)
    assert len(np.unique(found)) == VOCAB + 1, "some rank was never seen"


def test_equal_logits_are_ranked_as_top_k_takes_them():
    logits = jnp.array([[[1.0, 3.0, 3.0, 0.0, 3.0]] * 5])
    _, order = jax.lax.top_k(logits[0, 0], 5)
    found = rank_of(logits, jnp.arange(5)[None])
    np.testing.assert_array_equal(order[found[0]], np.arange(5))
