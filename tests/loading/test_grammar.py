"""Texts of a grammar are what it describes; unsupported schemas are named."""

import json
import random
from dataclasses import dataclass
from datetime import date
from functools import reduce

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest

import specjax
from specjax.core.errors import SpecjaxError
from specjax.decoding.automaton import DEAD, FREE
from specjax.decoding.processors import Processor
from specjax.loading import json_schema
from specjax.loading.grammar import load_grammar, token_bytes
from specjax.loading.json_schema import schema_regex

STRING = {"type": "string"}
SCHEMAS = {
    "scalars": {
        "type": "object",
        "properties": {"a.b": STRING, 'q"': {"type": ["number", "null"]}, "é": {"const": "x+\n"}},
        "required": ["a.b", "é"],
    },
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}, "c": {"enum": [1, "u"]}},
        "additionalProperties": False,
    },
    "arrays": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 2},
        "maxItems": 3,
    },
    "references": {
        "$defs": {"a/~%": {"anyOf": [{"type": "string", "format": "date"}]}},
        "anyOf": [
            {"$ref": "#/$defs/a~1~0%25/anyOf/0"},
            {
                "type": "array",
                "prefixItems": [{"$ref": "#/$defs/a~1~0%25/anyOf/0"}, {"type": "null"}],
            },
        ],
    },
    "strings": {
        "type": "object",
        "properties": {
            "short": STRING | {"minLength": 2, "maxLength": 3},
            "code": STRING | {"pattern": "^[A-Z]{2}[0-9]$"},
            "mail": STRING | {"format": "email"},
        },
        "required": ["short", "code", "mail"],
    },
    "types": {"type": ["string", "array"], "minLength": 2, "items": STRING, "minItems": 1},
    "free": {"type": "object", "properties": {"x": {}}, "required": ["x"]},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "none": {"type": "array", "items": STRING, "maxItems": 0},
}
DOUBLING = {  # what the last reference leads to has 2^30 alternatives
    "$defs": {
        "0": STRING,
        **{str(n): {"anyOf": [{"$ref": f"#/$defs/{n - 1}"}] * 2} for n in range(1, 31)},
    },
    "$ref": "#/$defs/30",
}
NESTING = {  # each definition is short, but not all of them together
    "$defs": {
        "0": {"const": "a"},
        **{str(n): {"anyOf": [{"$ref": f"#/$defs/{n - 1}"}] * 10} for n in range(1, 5)},
    },
    "anyOf": [{"$ref": "#/$defs/4"}] * 100,
}

KEYS = [*map(str, range(20_000))]  # which are read in linear time
DEEP = reduce(lambda inner, _: {"anyOf": [inner]}, range(400), STRING)


@pytest.fixture(scope="module")
def pocket():
    return specjax.load("pocket")


def random_texts(target, automaton, count: int) -> list[str]:
    """Random walks to an end, which turn to the nearest one after a while."""
    next_state, class_of = map(np.asarray, (automaton.next_state, automaton.class_of))
    distance = np.full(len(next_state) + 1, np.inf)  # to an end; the last entry is DEAD's
    distance[:-1][next_state[:, class_of[target.eos[0]]] != DEAD] = 0
    for _ in range(len(next_state)):
        distance[:-1] = np.minimum(distance[:-1], distance[next_state].min(axis=1) + 1)
    texts = token_bytes(target.tokenizer)
    walks = [_walk(next_state[:, class_of], distance, target.eos, seed) for seed in range(count)]
    for tokens in walks:
        text = b"".join(texts[token] for token in tokens)
        assert target.tokenizer.decode(tokens).encode() == text
    return [target.tokenizer.decode(tokens) for tokens in walks]


def _walk(next_state, distance, eos: tuple[int, ...], seed: int) -> list[int]:
    rng, state, tokens = random.Random(seed), 0, []
    while True:
        after = next_state[state]
        if len(tokens) > 12:
            after = np.where(distance[after] < distance[state], after, DEAD)
            if distance[state] == 0:
                return tokens
        token = rng.choice(np.flatnonzero(after != DEAD).tolist())
        if token in eos:
            return tokens
        state, tokens = after[token], [*tokens, token]


@pytest.mark.parametrize("name", SCHEMAS)
def test_all_texts_of_a_schema_parse_and_validate(name, pocket):
    automaton = load_grammar(pocket, json_schema=SCHEMAS[name])
    texts = set(random_texts(pocket, automaton, 30))
    for text in texts:
        value = json.loads(text)
        jsonschema.validate(value, SCHEMAS[name])
        if name == "references":
            date.fromisoformat(value if isinstance(value, str) else value[0])
    assert len(texts) > (0 if name == "none" else 5)


def test_a_type_selects_from_the_values_of_an_enumeration():
    values = ["x", 1, 2.0, None, True, [3]]
    regex = schema_regex({"type": ["integer", "null"], "enum": values})
    assert regex == schema_regex({"enum": [1, 2.0, None]})


def test_tokens_without_a_choice_are_those_of_the_tokenizer(pocket):
    for grammar, text in (
        ({"json_schema": SCHEMAS["strings"]}, '{"short": "ab", "code": "AB1", "mail": "a@b"}'),
        ({"choices": ["a longer text"]}, "a longer text"),
    ):
        automaton = load_grammar(pocket, **grammar)
        next_state, class_of, likely = map(np.asarray, jax.tree.leaves(automaton))
        tokens, state, are_right = pocket.tokenizer(text)["input_ids"], 0, []
        for token in tokens:
            if likely[state] != FREE:
                are_right.append(token == likely[state])
            state = next_state[state, class_of[token]]
        assert all(are_right)
        assert len(are_right) > 5 if "json_schema" in grammar else len(are_right) == len(tokens)


def test_a_text_of_choices_is_one_of_them(pocket):
    choices = ["yes", "no.", "ça (va)?", "a\nb"]
    automaton = load_grammar(pocket, choices=choices)
    assert set(random_texts(pocket, automaton, 60)) == set(choices)


@pytest.mark.parametrize(
    ("schema", "place", "part"),
    [
        ({"type": "integer", "minimum": 3}, "#", "minimum"),
        ({"type": "object", "properties": {"a": {"not": STRING}}}, "#/properties/a", "not"),
        ({"type": "object", "anyOf": [STRING]}, "#", "type"),
        ({"maxLength": 3}, "#", "maxLength"),
        ({"$ref": "#/$defs/a"}, "#/$ref", "#/$defs/a"),
        ({"$ref": "#a"}, "#/$ref", "there is no '#a'"),
        ({"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"},
         "#/$defs/a", "leads back"),
        (STRING | {"format": "hostname"}, "#", "hostname"),
        (STRING | {"pattern": ".*"}, "#", "quotes"),
        (STRING | {"pattern": "a", "maxLength": 3}, "#", "one of"),
        (STRING | {"minLength": 4, "maxLength": 3}, "#", "maxLength 3 is below"),
        ({"type": "object", "properties": {"a": STRING}, "required": ["b"]}, "#", "'b'"),
        ({"enum": []}, "#/enum", "empty"),
        ({"type": "integer", "enum": ["x", 0.5, True]}, "#/enum", "no value is of type integer"),
        ({"type": "text", "const": "x"}, "#/type", "'text' is not one or more of string"),
        ({"type": [{}]}, "#", "type"),
        ({"enum": [1, {"a": float("inf")}]}, "#/enum", "infinity"),
        (STRING | {"format": []}, "#", "format"),
        ({"type": "object", "properties": {"a": STRING}, "required": [{}]}, "#", "{}"),
        (STRING | {"pattern": "a)|(b"}, "#/pattern", "not supported"),
        (STRING | {"pattern": "a{99999999999}"}, "#/pattern", "not supported"),
        (STRING | {"pattern": "\ud800"}, "#/pattern", "surrogate"),
        ({"type": "array", "minItems": "3", "maxItems": None}, "#", "minItems must be"),
        (DOUBLING, "#/$defs/", "too large"),
        (NESTING, "#/$defs/", "too large"),
        (DEEP, "#", "nested too deeply"),
        ({"type": "object", "properties": dict.fromkeys(KEYS, STRING), "required": KEYS},
         "#", "too large"),
    ],
)  # fmt: skip
def test_the_part_of_a_schema_that_is_not_supported_is_named(schema, place, part):
    with pytest.raises(SpecjaxError) as error:
        schema_regex(schema)
    assert str(error.value).startswith(f"the JSON schema at {place}")
    assert part in str(error.value)


@pytest.mark.parametrize(
    ("pattern", "read"),
    [
        *((same, same) for same in (r"\.d", r"\p{L}{1,2}", "(?<sign>[+-])[0-9]")),
        *((r"^\d{3}$", "[0-9]{3}"), (r"[\w.]+", "[[0-9A-Za-z_].]+")),
    ],
)
def test_classes_of_a_pattern_are_those_of_json_schemas(pattern, read):
    """Otherwise its syntax is that of the library that reads it."""
    assert schema_regex(STRING | {"pattern": pattern}) == f'("({read})")'


def test_different_patterns_are_limited(monkeypatch):
    monkeypatch.setattr(json_schema, "MAX_PATTERNS", 1)
    a, b = (STRING | {"pattern": pattern} for pattern in "ab")
    assert schema_regex({"anyOf": [a, a]})
    with pytest.raises(SpecjaxError, match="#/anyOf/1/pattern: a schema may have 1 patterns"):
        schema_regex({"anyOf": [a, b]})


@dataclass(frozen=True)
class Without(Processor):
    """Bans one token, without arrays."""

    token: int

    def apply(self, params, logits, state, nodes):
        return logits.at[..., self.token].set(-jnp.inf)


def test_a_grammar_goes_with_other_processors(tiny):
    target = specjax.load(tiny)
    first = target.tokenizer("yes")["input_ids"][0]
    settings = {"choices": ["yes", "no"], "max_new_tokens": 8}
    sampling = specjax.Sampling(processors=(Without(first),))
    answer = specjax.generate_text(target, "Is it?", sampling=sampling, **settings)
    assert first not in answer.tokens
    assert answer.finish_reason == "length" or answer.text in ("yes", "no")
