"""Speculative sampling through the real loop: its text, its chains, its cache and its passes."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import DraftTree, Draw, Engine, Params, Sampling
from specjax.decoding.drafters.draft_model import DraftModel, SharedVocabulary
from specjax.decoding.drafters.length_rules import Confidence, Disco, Fixed, Heuristic
from specjax.models.transformer import Transformer
from tests.decoding import contract
from tests.decoding.rounds import Round, proposals, rounds_of
from tests.decoding.test_length_rules import classifier, wants_more
from tests.decoding.tiny import (
    BATCH,
    PASSES,
    Watched,
    pass_widths,
    plain_pass,
    prompt,
    slow_except,
    target,
)

NEW_TOKENS, LONGEST = 60, 4
RULES = {
    "fixed": Fixed(3),
    "heuristic": Heuristic(start=2),
    "confidence": Confidence(0.06),
    "disco": Disco(0.5, "generation"),
}


def drafter(rule: str, **settings) -> DraftModel:
    return DraftModel(target()[0], RULES[rule], **{"max_length": LONGEST, **settings})


@cache
def near():
    """Weights that are near the target's."""
    both = jax.device_get((target()[1], target(seed=4)[1]))
    return jax.tree.map(lambda mine, its: jnp.asarray(mine + 0.15 * (its - mine)), *both)


def with_rule(rule: str, draft) -> dict:
    return {"draft": draft, "rule": classifier() if rule == "disco" else None}


@pytest.mark.slow
def test_a_chosen_draft_is_right_too_and_worse_where_the_target_draws():
    settings = {"new_tokens": NEW_TOKENS, "case": ("sampled", BATCH, False)}
    accepted = []
    for is_drawn in (True, False):
        own, params = drafter("fixed", is_drawn=is_drawn), with_rule("fixed", target()[1])
        out = contract.assert_lossless(own, params, **settings)
        accepted.append(float(out.stats.mean_accepted_length))
    assert accepted[1] < accepted[0] - 0.3


STEPPED = slow_except(
    [*((rule, "sampled") for rule in RULES), ("confidence", "greedy")], ("disco", "sampled")
)


@cache
def rounds(rule: str, sampling: str) -> tuple[list[Round], list[int]]:
    """All rounds with the near draft, and its passes' widths; rows end on their own."""
    eos = tuple(contract.truth(sampling, BATCH)[0, 16:17].tolist())
    settings = {"sampling": contract.SAMPLINGS[sampling], "max_new_tokens": NEW_TOKENS, "eos": eos}
    own = replace(drafter(rule), draft=Watched(target()[0].config))
    PASSES.clear()
    params = Params(target()[1], with_rule(rule, near()))
    played = rounds_of(Engine(target()[0], own, **settings), params, key=contract.KEY)
    return played, pass_widths()


def with_draft(found: Round) -> np.ndarray:
    """The committed texts followed by what was drafted."""
    texts = found.before.tokens.copy()
    for row, length in enumerate(found.before.length):
        texts[row, length : length + LONGEST] = 0
        drafted = found.tree.tokens[row, 1:]
        texts[row, length : length + len(drafted)] = drafted
    return texts


@jax.jit
def drawn_and_likely(draw: Draw, logits, places):
    return jnp.argmax(draw.perturbed(logits, places), axis=-1), jax.nn.softmax(logits, axis=-1)


@pytest.mark.parametrize("rule, sampling", STEPPED)
def test_every_chain_follows_the_draft_and_the_rule(rule, sampling):
    rule_params = with_rule(rule, None)["rule"]
    start, most, lengths = prompt(BATCH).length, drafter(rule).max_depth, []
    schedule = [2] * BATCH  # the heuristic's, read plainly
    for found in rounds(rule, sampling)[0]:
        before, tree = found.before, found.tree
        logits = plain_pass(near(), jnp.asarray(with_draft(found)), target()[0])[0].logits
        places = jnp.arange(1, logits.shape[1] + 1)[None, :] + jnp.zeros((BATCH, 1), jnp.int32)
        draw = Draw(before.sequence_keys, jnp.asarray(before.length), contract.SAMPLINGS[sampling])
        said, probs = map(np.asarray, drawn_and_likely(draw, logits, places))
        for row in np.flatnonzero(~before.is_done):
            length, count = before.length[row], int(tree.valid[row].sum()) - 1
            lengths.append(count)
            assert 1 <= count <= most
            for at in range(count):
                root = length - 1 + at
                assert tree.tokens[row, at + 1] == said[row, root]
                in_new_text = length + at - int(start[row])
                given = (probs[row, root], said[row, root], at, in_new_text, length + at)
                goes_on = wants_more(RULES[rule], rule_params, schedule[row], *given)
                assert goes_on == (at + 1 < count) or at + 1 == most
            all_accepted = found.after.length[row] - length == count + 1
            schedule[row] = min(schedule[row] + 2, most) if all_accepted else schedule[row] - 1
            schedule[row] = max(schedule[row], 1)
    assert len(set(lengths)) > 2 or rule == "fixed"


@pytest.mark.parametrize("rule, sampling", STEPPED)
def test_the_cache_holds_the_committed_text_except_its_last_one_or_two_tokens(rule, sampling):
    missing = []
    for found in rounds(rule, sampling)[0]:
        state, cache = found.after, found.after.drafter.cache
        fresh = plain_pass(near(), jnp.asarray(state.tokens), target()[0])[1]
        fresh = jax.device_get(fresh)
        for row in np.flatnonzero(state.length > found.before.length):
            held = int(cache.length[row])
            missing.append(int(state.length[row]) - held)
            np.testing.assert_array_equal(cache.positions[row, :held], np.arange(held))
            for mine, its in zip(cache.keys + cache.values, fresh.keys + fresh.values, strict=True):
                np.testing.assert_allclose(mine[row, :, :held], its[row, :, :held], atol=2e-4)
    assert set(missing) == {1, 2}


def test_no_pass_runs_for_unneeded_tokens():
    played, passes = rounds("disco", "sampled")
    longest = [int(found.proposed.num_drafted.max()) for found in played]
    assert passes.count(2) == len(played)
    assert passes.count(1) == sum(max(count - 1, 0) for count in longest)
    assert len(set(longest)) > 2


@pytest.mark.slow
def test_nothing_is_drafted_beyond_the_positions_of_the_draft():
    model, _ = target()
    short = Transformer(replace(model.config, max_position_embeddings=37))
    own = replace(drafter("fixed"), draft=short)
    case, params = ("greedy", BATCH, False), with_rule("fixed", target()[1])
    out = contract.assert_lossless(own, params, new_tokens=NEW_TOKENS, case=case)
    # The last pass feeds position 36, after which position 37 is drafted.
    for row, length in enumerate(prompt(BATCH).length.tolist()):
        last = np.flatnonzero(out.from_draft[row])[-1] + length
        assert last in (36, 37)
    assert drafter("fixed").draft.config.longest_text >= 37 + NEW_TOKENS


def test_a_tree_holds_what_its_tokens_were_drawn_from_if_the_rule_needs_it():
    rejection = Sampling(temperature=0.5, verification="rejection")
    fixed, params = drafter("fixed"), Params(target()[1], with_rule("fixed", near()))
    for own, sampling, is_held in (
        (fixed, rejection, True),
        (replace(fixed, is_drawn=False), rejection, False),
        (fixed, replace(rejection, verification="coupled"), False),
        (fixed, replace(rejection, temperature=0.0), False),
    ):
        engine = Engine(target()[0], own, sampling, max_new_tokens=NEW_TOKENS)
        state = jax.eval_shape(engine.prefill, params, prompt(), contract.KEY)
        tree = jax.eval_shape(engine.propose, params, state)[1].tree
        assert (tree.draft_probs is not None) == is_held
        assert not is_held or tree.draft_probs.dtype == jnp.float32


def test_a_rule_is_named_or_given():
    model, _ = target()
    for settings, rule in (
        ({"rule": "fixed", "length": 7}, Fixed(7)),
        ({"rule": "heuristic", "length": 7}, Heuristic(7)),
        ({"rule": "confidence"}, Confidence(0.4)),
        ({"rule": "disco", "threshold": 0.3, "position": "generation"}, Disco(0.3, "generation")),
    ):
        own = DraftModel(model, **settings)
        assert own.length_rule == rule
        assert own.max_depth == own.num_nodes - 1 == (7 if settings["rule"] == "fixed" else 20)
    assert DraftModel(model) == DraftModel(model, "fixed", 5, max_length=20, is_drawn=True)


def test_params_that_do_not_belong_together_are_rejected():
    own = target()[1]
    form = "DraftModel needs the params {'draft': the draft's weights"
    other = "the draft: the model's params do not fit it .*; pass those that were loaded with it"
    shared = with_rule("fixed", own) | {"vocabulary": SharedVocabulary(*[jnp.arange(39)] * 3)}
    for rule, params, message in (
        ("fixed", None, form),
        ("fixed", {"draft": 1}, form),
        ("fixed", with_rule("fixed", target(layers=1)[1]), other),
        ("fixed", with_rule("fixed", None), other),
        ("fixed", with_rule("disco", own), "length rule Fixed has no params but was given some"),
        ("disco", with_rule("fixed", own), "Disco needs the weights of a classifier; pass"),
        ("fixed", shared, "that of 39 target tokens, not of 40"),
    ):
        contract.assert_params_rejected(drafter(rule), params, message)


def padded_draft(num_tokens: int, **settings):
    """The target as a draft, with fewer tokens or more behind its own."""
    model, weights = target(**settings)
    config = replace(model.config, vocab_size=num_tokens)

    def fitted(leaf):
        if leaf.shape[:1] != (model.config.vocab_size,):
            return leaf
        missing = max(num_tokens - len(leaf), 0)
        return jnp.pad(leaf, ((0, missing), (0, 0)), "edge")[:num_tokens]

    return model.clone(config=config), jax.tree.map(fitted, weights)


def drafted(model, params, rule="fixed", **known) -> DraftTree:
    """Drafts after the prompts."""
    drafter = DraftModel(model, rule, max_length=5)
    engine = Engine(target()[0], drafter, contract.SAMPLINGS["sampled"], NEW_TOKENS)
    request = Params(target()[1], {"draft": params, "rule": None} | known)
    state = engine.prefill(request, prompt(), contract.KEY)
    return proposals(engine, request, [state])[0]


def test_drafts_with_a_larger_a_smaller_and_a_shuffled_vocabulary_draft_the_same_tokens():
    """The draft is the target but for its tokens."""
    larger = drafted(*padded_draft(43)).tokens
    np.testing.assert_array_equal(larger[:, 1:], contract.truth("sampled", BATCH)[:, :5])
    model, params = padded_draft(33)
    smaller = drafted(model, params).tokens
    assert (smaller[:, 1:] < 33).all() and (smaller[:, 1:] == larger[:, 1:]).any()
    old = np.random.default_rng(3).permutation(33)  # of each new id
    new = np.argsort(old)  # of each old id
    shuffled = jax.tree.map(lambda leaf: leaf[old] if len(leaf) == 33 else leaf, params)
    ids = new[np.minimum(np.arange(40), 32)], np.arange(33), new
    shared = SharedVocabulary(*(jnp.asarray(each, jnp.int32) for each in ids))
    found = drafted(model, shuffled, vocabulary=shared).tokens
    np.testing.assert_array_equal(found, smaller)


def test_confidence_is_the_probability_of_the_drawn_token_among_the_shared_ones():
    """Shared tokens have other ids than places, so a place read by id would lie outside."""
    ids = jnp.arange(20, 33)
    shared = SharedVocabulary(jnp.arange(40), ids, ids)
    tree = drafted(*padded_draft(33), Confidence(1e-9), vocabulary=shared)
    assert (tree.valid.sum(axis=1) == 1 + 5).all()
