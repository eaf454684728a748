"""Speculative sampling through the real loop: its text, its chains, its cache and its passes."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.papers.oracle import Oracle
from specjax.decoding.drafter import Context, Params, Proposal
from specjax.decoding.drafters.draft_model import DraftModel, SharedVocabulary
from specjax.decoding.drafters.length_rules import Confidence, Disco, Fixed, Heuristic
from specjax.decoding.engine import Engine
from specjax.decoding.sampling import Draw, Sampling
from specjax.decoding.tree import DraftTree
from specjax.models.transformer import Transformer
from tests.decoding import contract
from tests.decoding.rounds import Round, proposals, rounds_of
from tests.decoding.test_length_rules import classifier, wants_more
from tests.decoding.tiny import (
    BATCH,
    PASSES,
    Lying,
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
    "oracle": Oracle(),
}


def drafter(rule: str, **settings) -> DraftModel:
    return DraftModel(target()[0], RULES[rule], **{"max_length": LONGEST, **settings})


@cache
def weights(draft: str):
    """Returns weights that equal the target's, that are near them, or that are unrelated."""
    _, params = target()
    if draft == "same":
        return params
    other = target(seed=4)[1]
    share = {"near": 0.15, "other": 1.0}[draft]
    return jax.tree.map(lambda mine, its: mine + share * (its - mine), params, other)


def params_of(rule: str, draft: str, sampling: str = "greedy") -> Params:
    texts = partial(contract.whole_texts, sampling, BATCH)
    known = {"disco": classifier, "oracle": texts}.get(rule)
    return Params(target()[1], {"draft": weights(draft), "rule": known and known()})


# ---- Text --------------------------------------------------------------------------------------


TO_LIMIT = (("sampled", BATCH, False),)


@cache
def generated(rule: str, draft: str):
    """The counts of a text, which is asserted to be that of plain decoding."""
    settings = {"new_tokens": NEW_TOKENS, "cases": TO_LIMIT}
    params = params_of(rule, draft, "sampled").drafter
    [out] = contract.assert_lossless(drafter(rule), params, **settings).values()
    return out.stats


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_the_tokens_are_those_of_plain_decoding_however_good_the_draft(rule):
    same, near, other = (generated(rule, draft) for draft in ("same", "near", "other"))
    # All is accepted up to the cut: the draft draws with the same noise.
    cut = same.drafted + same.rounds - NEW_TOKENS
    assert (cut >= 0).all() and (cut <= LONGEST).all()
    accepted = [float(stats.mean_accepted_length) for stats in (same, near, other)]
    assert accepted[0] > accepted[1] > accepted[2] >= 1
    assert accepted[1] > 1.3


@pytest.mark.slow
def test_a_chosen_draft_is_right_too_and_worse_where_the_target_draws():
    settings = {"new_tokens": NEW_TOKENS, "cases": TO_LIMIT}
    chosen, params = drafter("fixed", is_drawn=False), params_of("fixed", "same").drafter
    [out] = contract.assert_lossless(chosen, params, **settings).values()
    drawn = generated("fixed", "same").mean_accepted_length
    assert out.stats.mean_accepted_length < drawn - 0.3


# ---- round by round ----------------------------------------------------------------------------


STEPPED = [*((rule, "sampled") for rule in RULES), ("confidence", "greedy")]
STEPPED = slow_except(STEPPED, ("disco", "sampled"))


@cache
def rounds(rule: str, sampling: str) -> list[Round]:
    """All rounds of a generation with the near draft, whose rows end on their own."""
    eos = tuple(contract.truth(sampling, BATCH)[0, 16:17].tolist())
    settings = {"sampling": contract.SAMPLINGS[sampling], "max_new_tokens": NEW_TOKENS, "eos": eos}
    engine = Engine(target()[0], drafter(rule), **settings)
    return rounds_of(engine, params_of(rule, "near", sampling), key=contract.KEY)


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
    rule_params = params_of(rule, "near", sampling).drafter["rule"]
    start, most, lengths = prompt(BATCH).length, drafter(rule).max_depth, []
    schedule = [2] * BATCH  # the heuristic's, read plainly
    for found in rounds(rule, sampling):
        before, tree = found.before, found.tree
        logits = plain_pass(weights("near"), jnp.asarray(with_draft(found)), target()[0])[0].logits
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
                known = np.asarray(rule_params)[row] if rule == "oracle" else rule_params
                in_new_text = length + at - int(start[row])
                given = (probs[row, root], said[row, root], at, in_new_text, length + at)
                goes_on = wants_more(RULES[rule], known, schedule[row], *given)
                assert goes_on == (at + 1 < count) or at + 1 == most
            accepted = accepted_of(tree, row, truth_after(sampling, row, length - int(start[row])))
            if rule == "oracle":
                assert count - accepted <= 1
            all_accepted = accepted == count
            schedule[row] = min(schedule[row] + 2, most) if all_accepted else schedule[row] - 1
            schedule[row] = max(schedule[row], 1)
    assert len(set(lengths)) > 2 or rule == "fixed"


def truth_after(sampling: str, row: int, at: int) -> list[int]:
    return contract.truth(sampling, BATCH)[row, at : NEW_TOKENS + LONGEST].tolist()


def accepted_of(tree: DraftTree, row: int, true: list[int]) -> int:
    drafted = tree.tokens[row, 1 : int(tree.valid[row].sum())].tolist()
    agree = [mine == its for mine, its in zip(drafted, true, strict=False)]
    return agree.index(False) if False in agree else len(agree)


@pytest.mark.parametrize("rule, sampling", STEPPED)
def test_the_cache_holds_the_committed_text_except_its_last_one_or_two_tokens(rule, sampling):
    missing = []
    for found in rounds(rule, sampling):
        state, cache = found.after, found.after.drafter.cache
        fresh = plain_pass(weights("near"), jnp.asarray(state.tokens), target()[0])[1]
        fresh = jax.device_get(fresh)
        for row in np.flatnonzero(state.length > found.before.length):
            held = int(cache.length[row])
            missing.append(int(state.length[row]) - held)
            np.testing.assert_array_equal(cache.positions[row, :held], np.arange(held))
            for mine, its in zip(cache.keys + cache.values, fresh.keys + fresh.values, strict=True):
                np.testing.assert_allclose(mine[row, :, :held], its[row, :, :held], atol=2e-4)
    assert set(missing) == {1, 2}


def test_no_pass_runs_for_unneeded_tokens():
    own = replace(drafter("disco"), draft=Watched(target()[0].config))
    params = params_of("disco", "near")
    propose = jax.jit(partial(own.propose, target()[0]))
    longest = []
    for found in rounds("disco", "sampled"):
        state = jax.tree.map(jnp.asarray, found.before)
        draw = Draw(state.sequence_keys, state.length, contract.SAMPLINGS["sampled"])
        PASSES.clear()
        context = Context(state.tokens, state.length)
        jax.block_until_ready(propose(params, state.drafter, context, draw))
        longest.append(int((found.proposed.num_drafted).max()))
        assert pass_widths() == [2] + [1] * (longest[-1] - 1)
    assert len(set(longest)) > 1


@pytest.mark.slow
def test_nothing_is_drafted_beyond_the_positions_of_the_draft():
    model, _ = target()
    short = Transformer(replace(model.config, max_position_embeddings=37))
    own = replace(drafter("fixed"), draft=short)
    cases, params = (("greedy", BATCH, False),), params_of("fixed", "same").drafter
    out = contract.assert_lossless(own, params, new_tokens=NEW_TOKENS, cases=cases)["greedy", BATCH]
    # The last pass feeds position 36, after which position 37 is drafted.
    for row, length in enumerate(prompt(BATCH).length.tolist()):
        last = np.flatnonzero(out.from_draft[row])[-1] + length
        assert last in (36, 37)
    assert drafter("fixed").draft.config.longest_text >= 37 + NEW_TOKENS


# ---- rejection ---------------------------------------------------------------------------------

REJECTION_RULES = {"confidence": Confidence(0.4), "disco": Disco(0.5), "oracle": Oracle()}


def test_a_tree_holds_what_its_tokens_were_drawn_from_if_the_rule_needs_it():
    rejection = Sampling(temperature=0.5, verification="rejection")
    fixed, params = drafter("fixed"), params_of("fixed", "near")
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


def rejection_case(rule: str) -> tuple[DraftModel, dict]:
    model, draft = target(contract.VOCAB, layers=1, seed=1, scale=4.0)
    texts = np.random.default_rng(0).integers(0, contract.VOCAB, (contract.ROWS, 12))
    known = {"disco": classifier(), "oracle": jnp.asarray(texts)}.get(rule)
    own = DraftModel(model, REJECTION_RULES[rule], max_length=3)
    return own, {"draft": draft, "rule": known}


@pytest.mark.parametrize("rule", slow_except(REJECTION_RULES, "confidence"))
def test_drawn_drafts_keep_the_distribution(rule):
    assert contract.p_value(*rejection_case(rule)) > 1e-3


@pytest.mark.slow
def test_chosen_drafts_keep_the_distribution_too():
    own, params = rejection_case("confidence")
    assert contract.p_value(replace(own, is_drawn=False), params) > 1e-3


class Peeking(DraftModel):
    """Drops tokens for what they are."""

    def propose(self, target, params, state, context, draw):
        (tree, _), state = super().propose(target, params, state, context, draw)
        assert tree.draft_probs is not None
        own = jnp.take_along_axis(tree.draft_probs[:, :-1], tree.tokens[:, 1:, None], axis=2)[
            ..., 0
        ]
        kept = jnp.cumprod(own >= 0.4, axis=1).astype(bool)
        valid = tree.valid & jnp.pad(kept, ((0, 0), (1, 0)), constant_values=True)
        return Proposal(replace(tree, valid=valid)), state


class LyingDraft(Lying, DraftModel):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Peeking, LyingDraft])
def test_lies_about_what_was_drawn_are_caught(kind):
    own, params = rejection_case("confidence")
    assert contract.p_value(kind(own.draft, own.rule, max_length=own.max_length), params) < 1e-6


# ---- settings and params -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, rule",
    [
        ({"rule": "fixed", "length": 7}, Fixed(7)),
        ({"rule": "heuristic", "length": 7}, Heuristic(7)),
        ({"rule": "confidence"}, Confidence(0.4)),
        ({"rule": "disco", "threshold": 0.3, "position": "generation"}, Disco(0.3, "generation")),
    ],
)
def test_a_rule_is_named_or_given(settings, rule):
    own = DraftModel(target()[0], **settings)
    assert own.length_rule == rule
    assert own.max_depth == own.num_nodes - 1 == (7 if settings["rule"] == "fixed" else 20)
    assert DraftModel(own.draft) == DraftModel(own.draft, "fixed", 5, max_length=20, is_drawn=True)


OTHER = "the draft's weights belong to another model .*; pass the params that were loaded"
FORM = "DraftModel needs the params {'draft': the draft's weights"


@pytest.mark.parametrize(
    "rule, params, message",
    [
        ("fixed", None, FORM),
        ("fixed", {"draft": 1}, FORM),
        ("fixed", {"draft": target(layers=1)[1], "rule": None}, OTHER),
        ("fixed", {"draft": None, "rule": None}, OTHER),
        ("fixed", {"draft": target()[1], "rule": classifier()}, "rule Fixed has no params"),
        ("disco", {"draft": target()[1], "rule": None}, "Disco needs the weights"),
    ],
)
def test_params_that_do_not_belong_together_are_rejected(rule, params, message):
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


def test_a_draft_may_have_a_larger_vocabulary():
    model, params = padded_draft(43)
    found = contract.assert_lossless(
        DraftModel(model, max_length=5), {"draft": params, "rule": None}, new_tokens=60
    )
    [out] = found.values()
    assert out.stats.mean_accepted_length > 4, "the draft is the target but for the padding"


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [5, 8])
def test_rejection_keeps_the_distribution_with_padded_vocabularies(num_tokens):
    model, params = padded_draft(num_tokens, vocab_size=contract.VOCAB, layers=1, scale=4.0)
    drafter = DraftModel(model, "fixed", 2)
    assert contract.p_value(drafter, {"draft": params, "rule": None}) > 1e-3


def test_a_draft_with_a_smaller_vocabulary_and_shuffled_ids_drafts_the_same_tokens():
    num_tokens = 33
    model, params = padded_draft(num_tokens)
    drafter = DraftModel(model, max_length=5)
    known = {"draft": params, "rule": None}
    [ordered] = contract.assert_lossless(drafter, known, new_tokens=60).values()
    assert ordered.stats.mean_accepted_length > 1.5, "the draft is the target but for its size"
    old = np.random.default_rng(3).permutation(num_tokens)  # of each new id
    new = jnp.argsort(jnp.asarray(old)).astype(jnp.int32)  # of each old id
    shuffled = jax.tree.map(lambda leaf: leaf[old] if len(leaf) == num_tokens else leaf, params)
    read = new[jnp.minimum(jnp.arange(40), num_tokens - 1)]
    shared = SharedVocabulary(read, jnp.arange(num_tokens), new)
    known = {"draft": shuffled, "rule": None, "vocabulary": shared}
    [out] = contract.assert_lossless(drafter, known, new_tokens=60).values()
    np.testing.assert_array_equal(out.from_draft, ordered.from_draft)
    np.testing.assert_array_equal(out.stats.rounds, ordered.stats.rounds)
    wrong = known | {"vocabulary": replace(shared, readable=read[:39])}
    contract.assert_params_rejected(drafter, wrong, "that of 39 target tokens, not of 40")


def test_confidence_is_the_probability_of_the_drawn_token_among_the_shared_ones():
    """Shared tokens have other ids than places, so a place read by id would lie outside."""
    model, params = padded_draft(33)
    ids = jnp.arange(20, 33)
    shared = SharedVocabulary(jnp.arange(40), ids, ids)
    drafter = DraftModel(model, Confidence(1e-9), max_length=5)
    engine = Engine(target()[0], drafter, max_new_tokens=8)
    weights = Params(target()[1], {"draft": params, "rule": None, "vocabulary": shared})
    state = engine.prefill(weights, prompt(), jax.random.key(0))
    [tree] = proposals(engine, weights, [state])
    assert (tree.valid.sum(axis=1) == 1 + 5).all()
