"""Loads a grammar, from a JSON schema, a regular expression or choices, for a target's tokens."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from specjax.core.errors import SpecjaxError
from specjax.decoding.automaton import Automaton, Grammar, token_automaton
from specjax.decoding.sampling import Sampling
from specjax.loading.json_schema import literal, schema_regex
from specjax.loading.targets import LoadedTarget

SPACE_SIGN = "\u2581"  # of SentencePiece


def load_grammar(
    target: LoadedTarget,
    *,
    json_schema: Mapping[str, Any] | None = None,
    regex: str | None = None,
    choices: Sequence[str] = (),
) -> Automaton | None:
    """Returns the automaton of a grammar over the target's tokens; None without a grammar.

    Args:
        target: from `specjax.load`.
        json_schema: the text is JSON of this schema, with keys in the order of `properties`.
        regex: the whole text matches; in the syntax of Rust's `regex`, without anchors.
        choices: the text is one of these.

    Raises:
        SpecjaxError: if there are two of the three, or if one is invalid, not supported or too
            large; the message names the part.
    """
    num_grammars = sum((json_schema is not None, regex is not None, bool(choices)))
    if num_grammars == 0:
        return None
    if num_grammars > 1:
        raise SpecjaxError("json_schema, regex and choices exclude each other; keep one of them")
    if not target.eos:
        raise SpecjaxError(f"{target.name} has no end token, with which a grammar ends")
    if json_schema is not None:
        regex = schema_regex(json_schema)
    elif regex is None:
        regex = "|".join(map(literal, choices))
    tokenizer = target.require_tokenizer()
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    target_tokens = token_bytes(tokenizer), target.eos, target.config.vocab_size
    return token_automaton(regex, *target_tokens, encode)


def with_grammar(
    sampling: Sampling, automaton: Automaton | None
) -> tuple[Sampling, tuple[Automaton | None, ...]]:
    """Returns the sampling with the processor of a grammar, and `Params.processors`."""
    if automaton is None:
        return sampling, ()
    arrays = *[None] * len(sampling.processors), automaton
    return replace(sampling, processors=(*sampling.processors, Grammar())), arrays


def token_bytes(tokenizer: Any) -> dict[int, bytes]:
    """Returns the bytes that each token adds to a text, without special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = json.loads(backend.to_str())["decoder"] if backend else None
    kind = json.dumps(decoder, ensure_ascii=False)
    added = tokenizer.added_tokens_decoder
    plain = {text: token for text, token in tokenizer.get_vocab().items() if token not in added}
    if '"ByteLevel"' in kind:
        byte_of = _byte_level()
        plain = {text: token for text, token in plain.items() if byte_of.keys() >= set(text)}
        texts = {token: bytes(map(byte_of.__getitem__, text)) for text, token in plain.items()}
    elif SPACE_SIGN in kind:
        texts = {token: _piece(text) for text, token in plain.items()}
    else:
        raise SpecjaxError(
            f"the tokenizer of {tokenizer.name_or_path} is neither byte-level nor SentencePiece's, "
            "so the bytes of its tokens are unknown; use another target for structured output"
        )
    for token, entry in added.items():
        if not entry.special:
            texts[token] = entry.content.encode()
    return texts


def _piece(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x"):
        return bytes.fromhex(text[3:5])
    return text.replace(SPACE_SIGN, " ").encode()


def _byte_level() -> dict[str, int]:
    """Returns the byte of each character of byte-level vocabularies.

    Printable bytes stand for themselves, the others for characters from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    characters = [*map(chr, printable), *(chr(0x100 + n) for n in range(len(others)))]
    return dict(zip(characters, [*printable, *others], strict=True))
