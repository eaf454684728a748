"""Under a grammar every method generates plain decoding's tokens, and nothing but matches."""

import re
from dataclasses import dataclass
from functools import cache
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.decoding import Sampling, advanced, reference_generate
from specjax.decoding.automaton import Grammar, token_automaton
from specjax.decoding.drafters.grammar import GrammarDrafter
from specjax.decoding.drafters.hybrid import Hybrid
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from tests.decoding.contract import KEY, continued, generate
from tests.decoding.rounds import rows_of
from tests.decoding.tiny import DrawnChain, Oracle, OracleTree, bigram, prompt, slow_except, target

VOCAB, NEW_TOKENS, EOS = 40, 32, (39,)
TOKENS = [*map(str.encode, "abcdefghijklmnopqrstuvwxyz"), b"ab", b"cde", b"-", b"--", b"-a", b"b-"]
REGEX = "[a-m]{2,4}(-a?qrstu[a-f][a-z]?[n-z]){2,9}(--ab)?"
GRAMMAR = Grammar()


def encode(text: str) -> list[int]:
    """Writes a text in the longest tokens."""
    if not text:
        return []
    fits = [token for token in TOKENS if text.encode().startswith(token)]
    longest = max(fits, key=len)
    return [TOKENS.index(longest), *encode(text[len(longest) :])]


AUTOMATON = token_automaton(REGEX, dict(enumerate(TOKENS)), EOS, VOCAB, encode)
ORACLES = {"chain": Oracle(wrong_every=3), "tree": OracleTree()}
FREELY = {
    "pld": (PromptLookup(), None),
    "grammar": (GrammarDrafter(num_tokens=6), None),
    "hybrid": (
        Hybrid(GrammarDrafter(num_tokens=6), PromptLookup(num_tokens=4), num_tokens=8),
        {"copy": None, "head": None},
    ),
}


@dataclass(frozen=True)
class Forgetful(Grammar):
    """Does not follow a rejected branch back: it advances by tokens that were not kept."""

    def commit(self, params, state, tokens, count):
        return advanced(params.after, state, tokens, jnp.full_like(count, tokens.shape[1]))


@cache
def truth(temperature: float):
    model, params = target()
    sampling = Sampling(temperature, processors=(GRAMMAR,))
    settings = {"target": model, "sampling": sampling, "max_new_tokens": NEW_TOKENS, "eos": EOS}
    out = reference_generate(params, prompt(), KEY, **settings, processor_params=(AUTOMATON,))
    return jax.device_get(out)


def generated(drafter, known, temperature: float, grammar=GRAMMAR, eos=EOS, **options):
    sampling = Sampling(temperature, processors=(grammar,), **options)
    settings = {"sampling": sampling, "max_new_tokens": NEW_TOKENS, "eos": eos}
    return generate(drafter, known, arrays=(AUTOMATON,), **settings)


def texts_of(tokens, lengths) -> list[tuple[str, bool]]:
    """The text of each sequence, and whether it has ended."""
    return [
        (b"".join(TOKENS[token] for token in row if token not in EOS).decode(), row[-1] in EOS)
        for row in rows_of(tokens, lengths)
    ]


def assert_matches(tokens, lengths) -> None:
    for text, is_ended in texts_of(tokens, lengths):
        assert bool(re.fullmatch(REGEX, text)) or not is_ended


CASES = [("chain", 0.0), *product(("tree", *FREELY), (0.8,))]


@pytest.mark.parametrize(
    ("name", "temperature"), slow_except(CASES, ("tree", 0.8), ("grammar", 0.8))
)
def test_a_grammar_gives_the_tokens_of_plain_decoding(name, temperature):
    tokens, lengths = truth(temperature)
    assert_matches(tokens, lengths)
    assert any(is_ended for _, is_ended in texts_of(tokens, lengths)) or not temperature
    drafter, known = FREELY.get(name) or (ORACLES[name], continued(*truth(temperature)))
    out = generated(drafter, known, temperature)
    np.testing.assert_array_equal(out.length, lengths)
    np.testing.assert_array_equal(out.tokens, tokens)
    if name != "pld":
        assert out.stats.accepted.sum() > 0
        assert name == "grammar" or out.stats.accepted.sum() < out.stats.drafted.sum()


@pytest.mark.slow
def test_an_automaton_that_does_not_follow_a_rejected_branch_back_is_caught():
    out = generated(ORACLES["chain"], continued(*truth(0.8)), 0.8, Forgetful())
    assert out.tokens.tolist() != truth(0.8)[0].tolist()


@pytest.mark.slow
def test_rejection_keeps_to_the_grammar():
    out = generated(DrawnChain(), bigram(VOCAB), 0.8, verification="rejection")
    assert_matches(out.tokens, out.length)


def test_a_grammar_without_its_automaton_or_an_end_token_is_an_error():
    with pytest.raises(SpecjaxError, match=r"eos=target\.eos"):
        generated(ORACLES["chain"], continued(*truth(0.8)), 0.8, eos=())
    with pytest.raises(SpecjaxError, match="load_grammar"):
        generate(PromptLookup(), sampling=Sampling(processors=(GRAMMAR,)), eos=EOS)
