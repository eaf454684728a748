"""Trees from one distribution per depth: against the scores of all paths."""

from dataclasses import dataclass
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from specjax.core.settings import SettingError
from specjax.decoding import Context, DraftTree, Draw, Sampling
from specjax.decoding.drafters._trees import MEDUSA_TREE, DepthTreeDrafter
from specjax.decoding.sampling import sequence_keys
from tests.decoding.test_head_trees import found_paths
from tests.decoding.test_tree import assert_well_formed

BATCH, DEPTHS, VOCABULARY = 2, 3, 7
CONTEXT = Context(jnp.arange(10).reshape(BATCH, 5) % VOCABULARY, jnp.full(BATCH, 5))


@dataclass(frozen=True)
class Given(DepthTreeDrafter):
    """A head with constant logits."""

    head: None = None
    num_depths = DEPTHS

    def propose(self, target, params, state, context, draw):
        raise NotImplementedError


@partial(jax.jit, static_argnums=0)
def made(drafter: Given, logits) -> DraftTree:
    draw = Draw(sequence_keys(jax.random.key(0), BATCH), CONTEXT.length, Sampling())
    return drafter.tree_of(logits, CONTEXT, draw)


@pytest.mark.parametrize("has_ties", [False, True])
def test_a_dynamic_tree_of_all_tokens_holds_the_most_likely_paths(has_ties):
    """Paths that tie for the last places may differ, but never without their parents."""
    drafter = Given(tree="dynamic", top_k=VOCABULARY, num_tokens=17)
    numbers, lengths = np.random.default_rng(3), range(1, DEPTHS + 1)
    paths = [path for length in lengths for path in product(range(VOCABULARY), repeat=length)]
    for _ in range(20):
        logits = numbers.normal(0, 2, (BATCH, DEPTHS, VOCABULARY)).astype(np.float32)
        logits = np.round(logits) if has_ties else logits
        tree = jax.device_get(made(drafter, logits))
        assert_well_formed(tree)
        for row, laws in enumerate(log_softmax(np.float64(logits), axis=-1)):
            scores = {path: laws[np.arange(len(path)), path].sum() for path in paths}
            best = sorted(paths, key=lambda path: -scores[path])[:16]
            found = found_paths(tree, row)
            assert len(set(found)) == len(found) == 16
            assert has_ties or set(found) == set(best)
            scores_found = [scores[path] for path in found]
            np.testing.assert_allclose(tree.scores[row, 1:], scores_found, rtol=1e-5)
            np.testing.assert_allclose(
                sorted(scores_found), sorted(scores[path] for path in best), rtol=1e-5
            )


def test_choices_deeper_than_the_head_are_left_out():
    assert len(MEDUSA_TREE) == 63
    assert (Given().max_depth, Given().num_nodes) == (3, 62)
    chain = Given(tree="dynamic", top_k=1, num_tokens=3)
    assert (chain.max_depth, chain.num_nodes) == (2, 3)
    assert made(chain, jnp.zeros((BATCH, DEPTHS, VOCABULARY))).is_chain


@pytest.mark.parametrize(
    ("name", "value"), [("top_k", 3), ("num_tokens", 26), ("depth", 2), ("noise_share", 0.0)]
)
def test_a_static_tree_rejects_settings_of_a_dynamic_one(name, value):
    with pytest.raises(SettingError, match="static tree; add tree=dynamic") as error:
        Given(**{name: value})
    assert error.value.field == name
    tuned = ((0,), (1,), (0, 0))
    assert getattr(Given(choices=tuned, tree="dynamic", **{name: value}), name) == value
    default = getattr(Given(), name)
    assert Given(choices=tuned, **{name: default}) == Given(choices=tuned)
