"""The automaton of a grammar allows exactly the tokens that can lead to a match."""

import re
from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.decoding import byte_automaton
from specjax.decoding.automaton import DEAD, token_automaton

TOKENS = [b"", b"a", b"b", b"ab", b"ba", b"\xc3", b"\xa9", b"c", b"bb", b"abc"]
END, OTHER_END = 10, 11
SIZE = 13  # one more than there are tokens: the target's vocabulary is padded
MAX_TOKENS = 4


def toy(regex: str):
    return token_automaton(regex, dict(enumerate(TOKENS)), (END, OTHER_END), SIZE)


@pytest.mark.parametrize("regex", ["a(b|é)a", "[ab]{2,3}", "ab|abc|b", "(aé?)+c?"])
def test_a_sequence_of_tokens_is_allowed_if_and_only_if_it_can_be_completed(regex):
    automaton = toy(regex)
    next_state, class_of = map(np.asarray, (automaton.next_state, automaton.class_of))
    allowed_in = np.asarray(automaton.allowed(jnp.arange(len(next_state))))
    texts = [
        b"".join(TOKENS[token] for token in tokens)
        for length in range(1, 7)
        for tokens in product((1, 2, 5, 6, 7), repeat=length)
    ]
    matches = {text for text in [*texts, b""] if _matches(regex, text)}
    prefixes = {text[:end] for text in matches for end in range(len(text) + 1)}
    for length in range(MAX_TOKENS):
        for tokens in product(range(1, 10), repeat=length):
            text, state = b"".join(TOKENS[token] for token in tokens), 0
            for token in tokens:
                state = next_state[state, class_of[token]] if state != DEAD else DEAD
            if len(text) > 5:
                continue
            assert (state != DEAD) == (text in prefixes)
            if state == DEAD:
                continue
            allowed = allowed_in[state]
            assert allowed[END] == allowed[OTHER_END] == (text in matches)
            assert not allowed[0] and not allowed[SIZE - 1]
            assert allowed.any()


def _matches(regex: str, text: bytes) -> bool:
    try:
        return re.fullmatch(regex, text.decode()) is not None
    except UnicodeDecodeError:
        return False


def test_states_from_which_no_tokens_lead_to_an_end_are_never_entered():
    automaton = toy("a(b|x)|cx")  # no token holds an x
    assert np.flatnonzero(automaton.allowed(jnp.asarray(0))).tolist() == [1, 3]
    with pytest.raises(SpecjaxError, match="no sequence of the target's tokens"):
        toy("x+")


def test_grammars_of_similar_size_share_a_program():
    shapes = {toy(regex).next_state.shape for regex in ("a", "(ab)*c?", "[ab]{2,30}")}
    assert len(shapes) == 1


@pytest.mark.parametrize(
    ("regex", "problem"),
    [
        ("^ab$", "leave out"),
        ("(?=a)b", "not supported"),
        ("a)|(b", "not supported"),
    ],
)
def test_an_expression_that_is_not_supported_is_an_error(regex, problem):
    with pytest.raises(SpecjaxError, match=re.escape(problem)):
        toy(regex)


@pytest.mark.parametrize(
    ("failure", "problem"),
    [
        ("raise OSError('no space')", "no space"),
        ("raise MemoryError", "counted repetitions"),
        ("import os; os.abort()", "counted repetitions"),
    ],
)
def test_only_a_process_that_outgrew_its_limits_is_called_too_large(
    failure, problem, tmp_path, monkeypatch
):
    script = tmp_path / "fails.py"
    script.write_text(failure)
    monkeypatch.setattr(byte_automaton, "__file__", str(script))
    with pytest.raises(SpecjaxError, match=problem):
        toy("a")


def test_the_number_of_states_is_limited(monkeypatch):
    monkeypatch.setattr(byte_automaton, "MAX_STATES", 30)
    toy("a{25}")
    with pytest.raises(SpecjaxError, match="has 31 states, and 30 are the limit"):
        toy("a{26}")


def test_an_expression_cannot_use_up_the_machine(monkeypatch):
    monkeypatch.setattr(byte_automaton, "MAX_SECONDS", 0.25)
    with pytest.raises(SpecjaxError, match="counted repetitions"):
        toy("(.{1,200}){1,200}")
