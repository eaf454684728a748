"""Medusa: its trees against literal ones, the feature it keeps, its law, and what is refused."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.decoding.drafters._trees import depth_tree

from specjax.core.errors import SpecjaxError
from specjax.decoding import round as round_module
from specjax.decoding.drafter import Context, Params, Proposal
from specjax.decoding.drafters.medusa import Medusa, MedusaSettings
from specjax.decoding.generate import speculative_generate, start_loop
from specjax.decoding.request import check_request
from specjax.decoding.round import one_round
from specjax.decoding.sampling import Draw, Sampling
from specjax.decoding.state import LoopState
from specjax.models.transformer import Transformer
from tests.decoding.heads import features_of
from tests.decoding.medusa_heads import CHOICES, MEDUSA, MEDUSA_DYNAMIC, medusa_head, said
from tests.decoding.test_distribution import VOCAB, p_value
from tests.decoding.test_tree import assert_well_formed, path_of
from tests.decoding.test_with_head import some_path
from tests.decoding.tiny import prompt, target

BATCH, NEW_TOKENS, LONGEST = 3, 60, 96
KEY = jax.random.key(2)
END = 35
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.8, top_k=9, top_p=0.9),
    "rejection": Sampling(temperature=0.8, top_k=2, verification="rejection"),
}
PARAMS = Params(target()[1], medusa_head()[1])


def rounds_of(own: Medusa) -> list[LoopState]:
    """Before the first round and after each, paths of all lengths being accepted."""
    settings = {"target": own.target, "drafter": own, "max_new_tokens": NEW_TOKENS}
    right, round_module.verify = round_module.verify, some_path
    try:
        step = jax.jit(
            lambda state: one_round(PARAMS, state, own.target, own, Sampling(), NEW_TOKENS, (END,))
        )
        states = [start_loop(PARAMS, prompt(BATCH), KEY, **settings)]
        while not states[-1].is_done.all():
            states.append(step(states[-1]))
    finally:
        round_module.verify = right
    return jax.device_get(states)


@cache
def rounds() -> list[LoopState]:
    return rounds_of(MEDUSA)


def before_roots(state: LoopState) -> np.ndarray:
    """The target's feature of the token before each root, from one pass over the texts."""
    tokens = np.zeros((BATCH, LONGEST), np.int32)
    for row, length in enumerate(state.length):
        tokens[row, :length] = state.tokens[row, :length]
    features = np.asarray(features_of(PARAMS, jnp.asarray(tokens), MEDUSA.target))
    return features[np.arange(BATCH), np.asarray(state.length) - 2]


# ---- the feature -------------------------------------------------------------------------------


def test_the_feature_is_that_of_the_token_before_the_root():
    """After every round, those of finished rows included, wherever the path was cut."""
    for state in rounds():
        np.testing.assert_allclose(state.drafter, before_roots(state), atol=1e-5, rtol=1e-5)
    lengths = np.diff([state.length for state in rounds()], axis=0)
    assert set(lengths.ravel()) >= {0, 1, 2, 3, 4}
    last = rounds()[-1]
    ends = [int(last.tokens[row, last.length[row] - 1]) for row in range(BATCH)]
    assert END in ends and set(ends) != {END}


class Uncut(Medusa):
    """Takes the last accepted node's feature, whether or not it is part of the text."""

    def update(self, params, state, outcome):
        assert outcome.output.hidden is not None
        return outcome.at_last_node(outcome.output.hidden[:, :, 0])


def test_paths_are_cut_by_the_end_of_a_text():
    states = rounds_of(Uncut(MEDUSA.head, MEDUSA.target, MEDUSA.settings))
    for state in states:
        wrong = np.abs(state.drafter - before_roots(state)).max(axis=1) > 1e-3
        assert not (wrong & ~state.is_done).any()
    assert wrong.any()


# ---- the tree ----------------------------------------------------------------------------------


def literal_logits(state: LoopState) -> np.ndarray:
    """What the heads say, by the formula and from a pass without a cache; `[B, K, V]`."""
    module, params = medusa_head()
    table = np.asarray(PARAMS.target["lm_head"]["weight"])
    return np.stack([said(module, params, each, table) for each in before_roots(state)])


@cache
def proposed(own: Medusa, sampling: Sampling):
    """Trees of some states in the middle of their texts."""
    propose = jax.jit(own.propose)
    found = []
    for state in rounds()[1:6:2]:
        draw = Draw(jax.random.split(KEY, BATCH), jnp.asarray(state.length), sampling)
        context = Context(jnp.asarray(state.tokens), draw.round_start)
        tree = propose(PARAMS, jnp.asarray(state.drafter), context, draw)[0].tree
        found.append((state, draw, jax.device_get(tree)))
    return found


@pytest.mark.parametrize("name", SAMPLINGS)
def test_every_node_is_the_token_of_its_rank_at_its_depth(name):
    sampling = SAMPLINGS[name]
    for state, draw, tree in proposed(MEDUSA, sampling):
        assert_well_formed(tree)
        logits = literal_logits(state)
        assert (tree.proposal is None) == (name != "rejection")
        for row in range(BATCH):
            best = []
            for depth in range(3):
                scores = logits[row, depth]
                law = np.asarray(draw.filtered(jnp.asarray(scores)))
                if name != "greedy":
                    at = jnp.full((BATCH, 1), state.length[row] + depth)
                    noise = np.asarray(draw.noise(at, 40))[row, 0]
                    # What the target would draw; a token that its filters cut is set back.
                    scores = scores / 0.8 + noise - 2 * np.isneginf(law)
                    scores = law + noise if name == "rejection" else scores
                ranked = np.argsort(-scores)
                best.append([int(token) for token in ranked if scores[token] > -np.inf])
            expected = [
                tuple(best[depth][rank] for depth, rank in enumerate(choice))
                for choice in sorted(CHOICES, key=lambda choice: (len(choice), choice))
                if all(rank < len(best[depth]) for depth, rank in enumerate(choice))
            ]
            nodes = range(1, int(tree.valid[row].sum()))
            paths = [path_of(tree, row, node)[1:] for node in nodes]
            assert [tuple(tree.tokens[row, path].tolist()) for path in paths] == expected
            assert tree.tokens[row, 0] == state.tokens[row, state.length[row] - 1]
            if name == "rejection":
                assert len(expected) < len(CHOICES)


def test_the_dynamic_tree_is_made_of_what_the_heads_say():
    """`depth_tree` itself is judged by its own tests."""
    sampling = SAMPLINGS["sampled"]
    for state, draw, tree in proposed(MEDUSA_DYNAMIC, sampling):
        logits = jnp.asarray(literal_logits(state), jnp.float32)
        context = Context(jnp.asarray(state.tokens), draw.round_start)
        expected = depth_tree(MEDUSA_DYNAMIC.settings, logits, context, draw)
        for name in ("tokens", "parents", "depth", "valid"):
            np.testing.assert_array_equal(getattr(tree, name), getattr(expected, name))
        assert tree.tokens.shape == (BATCH, MEDUSA_DYNAMIC.num_nodes)


def test_heads_deeper_than_the_tree_are_not_computed():
    def products(settings: MedusaSettings) -> int:
        own = settings.build(MEDUSA.head, MEDUSA.target)
        state = jax.tree.map(jnp.asarray, rounds()[0])
        draw = Draw(state.row_keys, state.length, Sampling())
        context = Context(state.tokens, state.length)
        return str(jax.make_jaxpr(own.propose)(PARAMS, state.drafter, context, draw)).count(
            "dot_general["
        )

    assert (MEDUSA.max_depth, MEDUSA.num_nodes) == (3, len(CHOICES) + 1)
    assert products(MEDUSA.settings) == 3 * 3  # a block, applied twice, and an LM head each
    assert products(MedusaSettings()) == 4 * 3  # the published tree is as deep as four heads
    assert products(MedusaSettings(((0,),))) == 3


# ---- the law -----------------------------------------------------------------------------------


def few(kind: type[Medusa] = Medusa) -> Medusa:
    choices = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0))
    return kind(medusa_head(VOCAB, 1)[0], target(VOCAB, 1)[0], MedusaSettings(choices))


def test_drawn_trees_keep_the_law():
    assert p_value(few(), medusa_head(VOCAB, 1)[1]) > 1e-3


class Lying(Medusa):
    """Claims a law that its tokens were not drawn from."""

    def propose(self, params, state, context, draw):
        (tree, _), state = super().propose(params, state, context, draw)
        assert tree.proposal is not None
        return Proposal(replace(tree, proposal=jnp.full_like(tree.proposal, 1 / VOCAB))), state


def test_a_lie_about_what_was_drawn_breaks_it():
    assert p_value(few(Lying), medusa_head(VOCAB, 1)[1]) < 1e-6


# ---- what does not belong together ---------------------------------------------------------------


def test_heads_of_other_targets_and_params_of_other_heads_are_refused():
    def refused(own: Medusa, params, message: str):
        with pytest.raises(SpecjaxError, match=message) as caught:
            check_request(Params(PARAMS.target, params), prompt(1), target()[0], own, 4)
        assert "\n" not in str(caught.value)

    check_request(PARAMS, prompt(1), target()[0], MEDUSA, 4)
    other = replace(MEDUSA, head=medusa_head(41)[0])
    refused(other, medusa_head(41)[1], "made for a target of vocab_size 41, this one has 40; use")
    elsewhere = Transformer(replace(target()[0].config, rms_norm_eps=1e-3))
    refused(replace(MEDUSA, target=elsewhere), PARAMS.drafter, "built with another target")
    for wrong in (None, {}, PARAMS.target, medusa_head(has_lm_heads=False)[1]):
        refused(MEDUSA, wrong, "the params are not the weights of this head .*; pass those that")


def test_more_children_than_tokens_are_refused():
    with pytest.raises(SpecjaxError, match="10 children of one node, but the target has only 6"):
        MedusaSettings().build(medusa_head(VOCAB, 1)[0], target(VOCAB, 1)[0])


# ---- Medusa's own acceptance, which is lossy -----------------------------------------------------


def test_typical_acceptance_takes_what_is_likely_enough_and_nothing_else():
    """In the finished text every accepted token is as likely as the rule asks."""
    epsilon, delta = 0.05, 0.6
    sampling = Sampling(1.0, verification="typical", typical_epsilon=epsilon, typical_delta=delta)
    model, params = target()
    given = prompt(BATCH)
    run = partial(
        speculative_generate, target=model, drafter=MEDUSA, max_new_tokens=LONGEST - 40, eos=(7,)
    )
    weights = Params(params, medusa_head()[1])
    out = run(weights, given, jax.random.key(1), sampling=sampling)
    coupled = run(weights, given, jax.random.key(1), sampling=Sampling(1.0))
    assert (np.asarray(out.tokens) != np.asarray(coupled.tokens)).any(), "nothing is lost"
    accepted = 0
    for row in range(BATCH):
        start, count = int(given.length[row]), int(out.length[row])
        text = jnp.concatenate([given.tokens[row, :start], out.tokens[row, :count]])
        logits = model.logits(params, features_of(weights, text[None], model)[0])
        law = np.exp(np.asarray(jax.nn.log_softmax(logits), np.float64))
        for place in np.flatnonzero(np.asarray(out.from_draft[row, :count])):
            before = law[start + place - 1]
            least = min(epsilon, delta * np.exp(np.sum(before * np.log(before + 1e-5))))
            assert before[int(out.tokens[row, place])] > least - 1e-5
            accepted += 1
    assert accepted > 10
