"""One battery for every method: whatever it drafts, the text is that of plain decoding."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.bench.summary import TextMatch, TextPair
from specjax.bench.ties import NearTies
from specjax.data.datastore import build
from specjax.data.datastore import params as datastore_params
from specjax.decoding import Drafter, Engine, Generation, Params, Proposal, chain, stream, widths
from specjax.decoding.drafters.auto import Auto
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.decoding.drafters.eagle import Eagle
from specjax.decoding.drafters.eagle2 import Eagle2
from specjax.decoding.drafters.lookahead import Lookahead
from specjax.decoding.drafters.parallel_spec import ParallelSpec
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.drafters.prompt_lookup_plus import PromptLookupPlus
from specjax.loading.methods import METHODS
from specjax.loading.targets import LoadedTarget
from specjax.run.runner import trial_key
from tests.decoding import heads
from tests.decoding.contract import (
    ALONE,
    CASES,
    KEY,
    NEW_TOKENS,
    SAMPLED,
    SAMPLINGS,
    assert_lossless,
    assert_rejects_values_out_of_bounds,
    end_token,
    truth,
    whole_texts,
)
from tests.decoding.rounds import rows_of
from tests.decoding.tiny import BATCH, Oracle, OracleTree, prompt, slow_except, target

SEED = 1
FEW = ((0,), (1,), (0, 0))
BEAM = {"top_k": 3, "depth": 2, "num_tokens": 8}


@cache
def datastore():
    """Documents that share some of their text with what the target will say, not all."""
    documents = [tokens[40:200].tolist() for tokens in truth("greedy", BATCH)]
    documents += [tokens[:90].tolist() for tokens in truth("sampled", BATCH)]
    return datastore_params(build(documents, vocab_size=40))


def small(*parts: Any, params: Any = None, **settings: Any) -> tuple[tuple, Any, dict[str, Any]]:
    return parts, params, settings


def headed(head: tuple, **settings: Any) -> tuple[tuple, Any, dict[str, Any]]:
    return (head[0],), head[1], settings or {"choices": FEW}


def draft_model():
    model, params = target(layers=1)
    return small(model, params={"draft": params, "rule": None}, max_length=6)


# Methods made small, so that they compile quickly, by name or drafter: the parts they hold, params
# and settings. Copying methods draft few tokens, so that there are two widths of a pass, not three.
# A method that is not here reads nothing and is small enough by default.
SMALL: Any = {
    "Eagle": lambda: headed(heads.eagle_head()),
    "Eagle2": lambda: headed(heads.eagle_head(), **BEAM),
    "eagle3": lambda: headed(heads.eagle3_head(drafted=tuple(range(3, 40, 2))), **BEAM),
    "Hydra": lambda: headed(heads.hydra_head()),
    "Medusa": lambda: headed(heads.medusa_head()),
    "ParallelSpec": lambda: headed(heads.parallel_head()),
    "ParallelSpecMedusa": lambda: headed(heads.parallel_head(False)),
    "DraftModel": draft_model,
    "Retrieval": lambda: small(params=datastore(), max_drafted=12),
    "Lookahead": lambda: small(ngram_length=4, window_length=4, num_guesses=4),
    "Recycling": lambda: small(num_tokens=8),
    "PromptLookupPlus": lambda: small(num_tokens=7),
    "PromptLookupPlusAttention": lambda: small(num_tokens=7),
    "Auto": lambda: small(PromptLookup(), 0.1),
    "Hybrid": lambda: small(
        params={"copy": None, "head": heads.EAGLE2.params},
        copy=PromptLookupPlus(8, layer=2),
        head=Eagle2(heads.eagle_head()[0], **BEAM),
        num_tokens=14,
    ),
}
FORMS: Any = {  # of the methods, that run other code
    "hydra with prefix": lambda: heads.STATIC["hydra with prefix"].pair,
    "medusa, dynamic": lambda: heads.DYNAMIC["medusa dynamic"].pair,
    "parallel, dynamic": lambda: heads.DYNAMIC["parallel dynamic"].pair,
    "lookahead, narrow": lambda: (Lookahead(5, 1, 3, pool_from_prompt=True), None),
    "pld, guesses": lambda: (PromptLookup(3, num_guesses=3, allow_shorter=True), None),
    "pld-plus, strict": lambda: (PromptLookupPlus(layer=2, num_tokens=9, min_similarity=0.5), None),
    "auto, eagle2": lambda: (Auto(heads.EAGLE2.drafter, 0.5), heads.EAGLE2.params),
    "eagle, draft vocabulary": lambda: with_tree(Eagle, *heads.narrowed(heads.eagle_head())),
    "eagle3, static": lambda: with_tree(
        Eagle, *heads.eagle3_head(tap_norm="each", norm_output=True)
    ),
    "parallel, draft vocabulary": lambda: with_tree(
        ParallelSpec, *heads.narrowed(heads.parallel_head())
    ),
}


def with_tree(kind: type, head: Any, params: Any) -> tuple[Drafter, Any]:
    return kind(head, choices=heads.CHOICES), params


@dataclass(frozen=True)
class Stutter(specjax.Drafter):
    """A drafter from outside the package, with nothing but what it must have."""

    num_nodes = 4

    def propose(self, target, params, state, context, draw):
        drafted = jnp.repeat(context.root[:, None], 3, axis=1)
        return Proposal(chain(context.root, drafted, jnp.full_like(context.root, 3))), state


def spoiled(wrong_every: int, sampling: str, batch: int) -> jax.Array:
    """The whole texts, wrong at every `wrong_every`-th position."""
    texts = np.asarray(whole_texts(sampling, batch))
    is_wrong = np.arange(texts.shape[1]) % wrong_every == 0
    return jnp.asarray(np.where(is_wrong, (texts + 1) % 40, texts))


OTHERS: Any = {  # the first three are one program
    "never": lambda: (Oracle(max_depth=6), partial(spoiled, 1)),
    "sometimes": lambda: (Oracle(max_depth=6), partial(spoiled, 3)),
    "always": lambda: (Oracle(max_depth=6), whole_texts),
    "tree": lambda: (OracleTree(), whole_texts),
    "from outside": lambda: (Stutter(), None),
}
GREEDY_TO_LIMIT = ("greedy", 3, False)


def of_method(name: str) -> tuple[Drafter, Any]:
    make = SMALL.get(name) or SMALL.get(METHODS[name].drafter.__name__, small)
    parts, params, settings = make()
    return METHODS.make(name, target()[0].config, settings, *parts), params


@cache
def generated(name: str, case: tuple[str, int, bool]) -> Generation:
    """Returns what a drafter of the battery generates; asserts that it is lossless."""
    drafter = of_method(name) if name in METHODS else (FORMS | OTHERS)[name]()
    return assert_lossless(*drafter, case=case)


# Drafts do not depend on the temperature, golden traces show them at 0, or the gate of `auto` opens
# at 0 only. Those of a draft model do, and no trace shows them.
QUICK = [*METHODS, "tree", "from outside"]
QUICK = [(name, ALONE if name == "auto" else SAMPLED) for name in QUICK] + [("draft-model", ALONE)]


@pytest.mark.parametrize(
    ("name", "case"),
    slow_except(
        [
            *product(METHODS, CASES),
            *product(FORMS, (SAMPLED,)),
            *product(OTHERS, (GREEDY_TO_LIMIT, SAMPLED)),
        ],
        *QUICK,
        *product(("never", "sometimes", "always"), (GREEDY_TO_LIMIT,)),
    ),
)
def test_the_tokens_are_those_of_plain_decoding(name, case):
    num_accepted = generated(name, case).from_draft.sum()
    never_accepts = name in ("plain", "grammar", "never") or (name, case) == ("auto", SAMPLED)
    assert (num_accepted == 0) == never_accepts, "no draft was ever right"


@pytest.mark.parametrize(
    "name, impl",
    slow_except([("hass", "rbg"), ("draft-model", "rbg"), ("pld", "unsafe_rbg")], ("hass", "rbg")),
)
def test_no_switch_of_jax_and_no_kind_of_key_changes_a_token(name, impl):
    model, weights = target()
    made = {each: of_method(each) for each in (name, "plain")}  # in 64 bits weights are others

    def text(name: str) -> np.ndarray:
        drafter, params = made[name]
        given = Params(weights, params), prompt(), jax.random.key(1, impl=impl)
        settings = {"sampling": SAMPLINGS["sampled"], "max_new_tokens": 60}
        *_, whole = stream(*given, target=model, drafter=drafter, **settings)
        return np.asarray(whole.tokens)

    with jax.enable_x64(True), jax.debug_nans(True):
        drafted = text(name)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        np.testing.assert_array_equal(drafted, text("plain"))


@pytest.mark.parametrize("name", [*METHODS, *FORMS])
def test_rounds_keep_the_types_of_the_state_so_that_parts_share_a_program(name):
    model, weights = target()
    drafter, params = of_method(name) if name in METHODS else FORMS[name]()
    engine, given = Engine(model, drafter, max_new_tokens=8), Params(weights, params)
    state = jax.eval_shape(engine.prefill, given, prompt(2), KEY)
    after = jax.eval_shape(lambda *given: engine.run(*given, max_rounds=3), given, state)
    types = [
        jax.tree.map(lambda leaf: (leaf.dtype, leaf.weak_type), each) for each in (state, after)
    ]
    assert types[0] == types[1]


# On a CPU the tests of native kernels compare all methods in 16 bits, exactly.
IN_16_BITS = [("hass", SAMPLED)]
if os.environ["JAX_PLATFORMS"] != "cpu":
    IN_16_BITS = [*product([*METHODS, *FORMS], CASES)]


@pytest.mark.parametrize("padded_width", slow_except([0, 72], 0))
@pytest.mark.parametrize(("name", "case"), slow_except(IN_16_BITS, ("hass", SAMPLED)))
def test_in_16_bits_texts_diverge_only_at_near_ties(name, case, padded_width):
    sampling, batch, ends = case
    model, params = target()
    model = model.clone(padded_width=padded_width)
    drafter, own = of_method(name) if name in METHODS else FORMS[name]()
    params, own = (jax.tree.map(in_16_bits, each) for each in (params, own))
    given = prompt(batch)

    def texts(drafter: Drafter, own: Any) -> list[list[int]]:
        request, key = Params(params, own), trial_key(SEED, (0, 0))
        eos = (end_token(truth(sampling, batch)),) if ends else ()
        engine = Engine(model, drafter, SAMPLINGS[sampling], NEW_TOKENS, eos)
        out = engine.generate(request, given, key)
        return rows_of(out.tokens, out.length)

    loaded = LoadedTarget(model, params, None, model.config, "tiny")
    compare = NearTies(loaded, SAMPLINGS[sampling], SEED)
    prompts = rows_of(given.tokens, given.length)
    pairs = zip(prompts, texts(drafter, own), texts(Autoregressive(), None), strict=True)
    matches = [
        compare(TextPair(name, ("bfloat16",) * 2, *map(tuple, texts), (0, 0), row, batch))
        for row, texts in enumerate(pairs)
    ]
    print(f"{name}: {matches.count(TextMatch.NEAR_TIE)} of {batch} texts diverge at a near tie")
    assert set(matches) <= {TextMatch.SAME, TextMatch.NEAR_TIE}


def in_16_bits(leaf: Any) -> Any:
    return leaf.astype(jnp.bfloat16) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


@pytest.mark.parametrize("name", slow_except(METHODS, "draft-model", "pld"))
def test_the_condition_of_every_loop_computes_something(name):
    """Otherwise a loop has nothing to wait for in a CUDA graph. Greedy decoding only."""
    drafter, own = of_method(name)
    engine = Engine(target()[0], drafter, max_new_tokens=NEW_TOKENS)
    params = Params(target()[1], own)
    state = jax.eval_shape(engine.prefill, params, prompt(1), KEY)
    loops = list(loops_of(jax.make_jaxpr(lambda *given: engine.run(*given, 99))(params, state)))
    assert loops
    for condition in loops:
        assert {"lt", "gt", "le", "ge", "eq", "ne"} & {step.primitive.name for step in condition}


def loops_of(jaxpr: Any) -> Iterator[list[Any]]:
    """Yields the steps of the condition of each loop."""
    for step in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if step.primitive.name == "while":
            yield step.params["cond_jaxpr"].eqns
        for inner in jax.tree.leaves(list(step.params.values()), is_leaf=has_steps):
            if has_steps(inner):
                yield from loops_of(inner)


def has_steps(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")


@pytest.mark.parametrize("name", METHODS)
def test_settings_out_of_bounds_are_rejected(name):
    assert_rejects_values_out_of_bounds(of_method(name)[0])


# ---- What the battery would catch --------------------------------------------------------------


def test_a_batch_that_advances_by_its_minimum_is_caught(monkeypatch):
    right = widths.verify

    def wrong(*given):
        verification = right(*given)
        least = jnp.min(verification.num_accepted)
        return type(verification)(
            verification.path, jnp.full_like(verification.num_accepted, least), verification.bonus
        )

    monkeypatch.setattr(widths, "verify", wrong)
    drafter = Oracle(wrong_every=5, max_depth=3)  # not in the battery: compiled afresh
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        assert_lossless(drafter, whole_texts, new_tokens=64, case=GREEDY_TO_LIMIT)


def test_accepted_length_follows_how_often_the_target_agrees():
    never, sometimes, always = (
        generated(name, GREEDY_TO_LIMIT) for name in ("never", "sometimes", "always")
    )
    assert never.stats.mean_accepted_length == 1
    assert not never.from_draft.any()
    # 256 = 36 rounds of 7 and a last one cut to 4.
    np.testing.assert_array_equal(always.stats.rounds, [37] * BATCH)
    assert (always.stats.accepted_lengths[:, 7] == 36).all()
    assert (always.stats.accepted_lengths[:, 4] == 1).all()
    np.testing.assert_array_equal(always.stats.accepted, [36 * 6 + 4] * BATCH)  # one is cut off
    assert always.from_draft[:, -1].all(), "texts end in the middle of a path"
    assert 1 < sometimes.stats.mean_accepted_length < always.stats.mean_accepted_length
