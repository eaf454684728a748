"""Loads a grammar, from a JSON schema, a regular expression or choices, for a target's tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

from specjax.core.errors import SpecjaxError, check_type
from specjax.decoding.automaton import Automaton, token_automaton
from specjax.loading.json_schema import literal, schema_regex
from specjax.loading.targets import LoadedTarget
from specjax.loading.vocabularies import token_bytes


def load_grammar(
    target: LoadedTarget,
    *,
    json_schema: Mapping[str, Any] | None = None,
    regex: str | None = None,
    choices: Sequence[str] | None = None,
) -> Automaton | None:
    """Returns the automaton of a grammar over the target's tokens; None without a grammar.

    Args:
        target: from `specjax.load`.
        json_schema: the text is JSON of this schema, with keys in the order of `properties`.
        regex: the whole text matches; in the syntax of Rust's `regex`, without anchors.
        choices: the text is one of these.

    Raises:
        SpecjaxError: if more than one of the three is given, or one is invalid, not supported or
            too large; the message names the part.
    """
    check_type("target", target, LoadedTarget, "the target from specjax.load")
    num_grammars = sum(part is not None for part in (json_schema, regex, choices))
    if num_grammars == 0:
        return None
    if num_grammars > 1:
        raise SpecjaxError("json_schema, regex and choices exclude each other; keep one of them")
    if not target.eos:
        raise SpecjaxError(f"{target.name} has no EOS token, which ends a text with a grammar")
    if json_schema is not None:
        regex = schema_regex(json_schema)
    elif regex is not None:
        check_type("regex", regex, str, "a text")
    else:
        check_type("choices", choices, (list, tuple), "a list of texts")
        if not choices:
            raise SpecjaxError("choices is empty; pass at least one text")
        if not all(isinstance(text, str) for text in choices):
            raise SpecjaxError(f"choices must be a list of texts, got {choices!r}")
        regex = "|".join(map(literal, choices))
    tokenizer = target.require_tokenizer()
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    target_tokens = token_bytes(tokenizer), target.eos, target.config.vocab_size
    return token_automaton(regex, *target_tokens, encode)
