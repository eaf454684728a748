"""One battery for every method: whatever it drafts, the text is that of plain decoding."""

from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.data.datastore import build
from specjax.data.datastore import params as datastore_params
from specjax.decoding import Proposal, chain, widths
from specjax.decoding.drafter import Drafter, Params
from specjax.decoding.drafters.auto import Auto
from specjax.decoding.drafters.eagle import Eagle
from specjax.decoding.drafters.eagle2 import Eagle2
from specjax.decoding.drafters.lookahead import Lookahead
from specjax.decoding.drafters.parallel_spec import ParallelSpec
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.drafters.prompt_lookup_plus import PromptLookupPlus
from specjax.decoding.generate import speculative_generate, stream
from specjax.decoding.state import Generation
from specjax.loading.methods import METHODS
from tests.decoding import heads
from tests.decoding.contract import (
    CASES,
    GREEDY,
    KEY,
    SAMPLED,
    SAMPLINGS,
    assert_lossless,
    assert_rejects_values_out_of_bounds,
    truth,
    whole_texts,
)
from tests.decoding.heads import CHOICES
from tests.decoding.tiny import BATCH, Oracle, OracleTree, prompt, slow_except, target


@dataclass(frozen=True)
class Small:
    """A method made small, so that it compiles quickly: the parts it holds, and its settings.

    Copying methods draft few tokens, so that there are two widths of a pass, not three.
    """

    parts: tuple = ()
    params: Any = None
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def headed(cls, head: tuple, **settings: Any) -> "Small":
        return cls((head[0],), head[1], settings or {"choices": FEW})


@cache
def datastore():
    """Documents that share some of their text with what the target will say, not all."""
    documents = [tokens[40:200].tolist() for tokens in truth("greedy", BATCH)]
    documents += [tokens[:90].tolist() for tokens in truth("sampled", BATCH)]
    return datastore_params(build(documents, vocab_size=40))


def draft_model() -> Small:
    model, params = target(layers=1)
    return Small((model,), {"draft": params, "rule": None}, {"max_length": 6})


FEW = ((0,), (1,), (0, 0))
BEAM = {"top_k": 3, "depth": 2, "num_tokens": 8}
# By name or drafter; a method that is not here reads nothing and is small enough by default.
SMALL: Any = {
    "Eagle": lambda: Small.headed(heads.eagle_head()),
    "Eagle2": lambda: Small.headed(heads.eagle_head(), **BEAM),
    "eagle3": lambda: Small.headed(heads.eagle3_head(drafted=tuple(range(3, 40, 2))), **BEAM),
    "Hydra": lambda: Small.headed(heads.hydra_head()),
    "Medusa": lambda: Small.headed(heads.medusa_head()),
    "ParallelSpec": lambda: Small.headed(heads.parallel_head()),
    "ParallelSpecMedusa": lambda: Small.headed(heads.parallel_head(reads_features=False)),
    "DraftModel": draft_model,
    "Retrieval": lambda: Small(params=datastore(), settings={"max_drafted": 12}),
    "Lookahead": lambda: Small(settings={"ngram_length": 4, "window_length": 4, "num_guesses": 4}),
    "Recycling": lambda: Small(settings={"num_tokens": 8}),
    "PromptLookupPlus": lambda: Small(settings={"num_tokens": 7}),
    "PromptLookupPlusAttention": lambda: Small(settings={"num_tokens": 7}),
    "Auto": lambda: Small((PromptLookup(), 0.1)),
    "Hybrid": lambda: Small(
        params={"copy": None, "head": heads.EAGLE2.params},
        settings={
            "copy": PromptLookupPlus(8, layer=2),
            "head": Eagle2(heads.EAGLE2.drafter.head, **BEAM),
            "num_tokens": 14,
        },
    ),
}
FORMS = {  # of the methods, that run other code
    "hydra with prefix": heads.HYDRA_PREFIX[:2],
    "medusa, dynamic": heads.DYNAMIC["medusa dynamic"][:2],
    "parallel, dynamic": heads.DYNAMIC["parallel dynamic"][:2],
    "lookahead, narrow": (Lookahead(5, 1, 3, pool_from_prompt=True), None),
    "pld, shorter": (PromptLookup(allow_shorter=True, num_tokens=5, max_ngram=2), None),
    "pld, guesses": (PromptLookup(3, num_guesses=3, allow_shorter=True), None),
    "pld-plus, strict": (PromptLookupPlus(layer=2, num_tokens=9, min_similarity=0.5), None),
    "auto, eagle2": (Auto(heads.EAGLE2.drafter, 0.5), heads.EAGLE2.params),
    "eagle, draft vocabulary": heads.Headed.of(
        Eagle, heads.narrowed(heads.eagle_head()), choices=CHOICES
    )[:2],
    "eagle3, static": heads.Headed.of(
        Eagle, heads.eagle3_head(tap_norm="each", norm_output=True), choices=CHOICES
    )[:2],
    "eagle2, draft vocabulary": heads.Headed.of(
        Eagle2, heads.narrowed(heads.eagle_head()), top_k=3, depth=3, num_tokens=12
    )[:2],
    "parallel, draft vocabulary": heads.Headed.of(
        ParallelSpec, heads.narrowed(heads.parallel_head()), choices=CHOICES
    )[:2],
}
ORACLES = {
    "never": (Oracle(wrong_every=1), whole_texts),
    "sometimes": (Oracle(wrong_every=3, vary_length=True), whole_texts),
    "always": (Oracle(max_depth=6), whole_texts),
    "tree": (OracleTree(), whole_texts),
}
GREEDY_TO_LIMIT = ("greedy", 3, False)
# Drafts of the others do not depend on the temperature, or golden traces show them at 0.
# The gate of `auto` opens at 0 only.
QUICK_GREEDY = ("draft-model", "auto", *ORACLES)


def of_method(name: str) -> tuple[Drafter, Any]:
    small = SMALL.get(name, SMALL.get(METHODS[name].drafter.__name__, Small))()
    config = target()[0].config
    return METHODS.make(name, config, small.settings, *small.parts), small.params


@cache
def generated(name: str, case: tuple[str, int, bool]) -> Generation:
    """Returns what a drafter of the battery generates; asserts that it is lossless."""
    drafter = of_method(name) if name in METHODS else (FORMS | ORACLES)[name]
    [out] = assert_lossless(*drafter, cases=(case,)).values()
    return out


@pytest.mark.parametrize(
    ("name", "case"),
    slow_except(
        [
            *product(METHODS, CASES),
            *product(FORMS, (SAMPLED,)),
            *product(ORACLES, (GREEDY_TO_LIMIT, SAMPLED)),
        ],
        *product(METHODS, (SAMPLED,)),
        *product(QUICK_GREEDY, (GREEDY, GREEDY_TO_LIMIT)),
        ("tree", SAMPLED),
    ),
)
def test_the_tokens_are_those_of_plain_decoding(name, case):
    num_accepted = generated(name, case).from_draft.sum()
    never_accepts = name in ("plain", "grammar", "never") or (
        name == "auto" and case[0] == "sampled"
    )
    assert (num_accepted == 0) == never_accepts, "no draft was ever right"


@pytest.mark.parametrize("name", slow_except(METHODS, "draft-model", "hass"))
def test_no_switch_of_jax_changes_a_token(name):
    with jax.enable_x64(True), jax.debug_nans(True):
        assert_text_of_plain_decoding(name, jax.random.key(1, impl="rbg"))


@pytest.mark.parametrize("name", METHODS)
def test_no_dtype_is_promoted_implicitly(name):
    (model, weights), (drafter, params) = target(), of_method(name)
    generate = partial(speculative_generate, target=model, drafter=drafter, max_new_tokens=60)
    sampled = partial(generate, sampling=SAMPLINGS["sampled"])
    with jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(sampled, Params(weights, params), prompt(), KEY)


def test_keys_of_every_kind_generate_the_tokens_of_plain_decoding():
    assert_text_of_plain_decoding("pld", jax.random.key(1, impl="unsafe_rbg"))


def assert_text_of_plain_decoding(name: str, key: jax.Array):
    (model, weights), settings = target(), {"sampling": SAMPLINGS["sampled"], "max_new_tokens": 60}
    texts = []
    for drafter, params in (of_method(name), of_method("plain")):
        given = Params(weights, params), prompt(), key
        *_, whole = stream(*given, target=model, drafter=drafter, **settings)
        texts.append(np.asarray(whole.tokens))
    np.testing.assert_array_equal(*texts)


@pytest.mark.parametrize("name", METHODS)
def test_settings_out_of_bounds_are_rejected(name):
    assert_rejects_values_out_of_bounds(of_method(name)[0])


# ---- A drafter from outside the package --------------------------------------------------------


@dataclass(frozen=True)
class Stutter(specjax.Drafter):
    """Drafts the last token again and again."""

    num_nodes = 4

    def propose(self, target, params, state, context, draw):
        drafted = jnp.repeat(context.root[:, None], 3, axis=1)
        return Proposal(chain(context.root, drafted, jnp.full_like(context.root, 3))), state


def test_a_drafter_is_one_class_with_a_number_of_nodes_and_a_proposal():
    found = assert_lossless(Stutter(), new_tokens=40)
    assert any(out.from_draft.any() for out in found.values()), "no draft was ever right"


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
        assert_lossless(drafter, whole_texts, new_tokens=64, cases=(GREEDY_TO_LIMIT,))


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
    assert 1 < sometimes.stats.mean_accepted_length < always.stats.mean_accepted_length


def test_text_ends_at_max_new_tokens_in_the_middle_of_a_path():
    [out] = assert_lossless(*ORACLES["tree"], new_tokens=10, cases=(GREEDY_TO_LIMIT,)).values()
    assert out.from_draft[:, -1].any()
